"""The reference of the configuration, made of the models that read it.

`python -m tests.docs.settings > docs/configuration.md` writes the page anew. What a key means is what stands under its
field in the source, so nothing is said twice.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from datetime import date
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from unisono.config import KIND_ALIASES, KINDS, Config

COMMAND = "python -m tests.docs.settings > docs/configuration.md"
HEAD = f"""# Configuration

Written by `{COMMAND}` from the models that read the file.
[config.example.yaml](../config.example.yaml) shows every key in place.

The file is YAML, or JSON. `os.environ/NAME` as a value reads the environment. Times are in seconds. The names are
LiteLLM's where it has one: its keys without effect here are listed at start, keys that nobody knows are errors that
begin with their path. `unisono check --config FILE` says whether a file is right and its backends are; `kill -HUP` has
a running gateway [read it again](operations.md).

The kind of a backend is the first part of `litellm_params.model`: {", ".join(f"`{kind}`" for kind in KINDS)}
({", ".join(f"`{alias}` is `{kind}`" for alias, kind in KIND_ALIASES.items())}); any other
is a provider's, and what is not gpt-oss [passes through](passthrough.md).
"""
WORDS: Mapping[object, str] = {
    str: "text",
    SecretStr: "text, secret",
    int: "whole number",
    float: "number",
    bool: "`true`, `false`",
    date: "date",
    NoneType: "",
}


def explained(model: type[BaseModel]) -> Mapping[str, str]:
    """The sentences under the fields of a model and of what it is made of."""
    found: dict[str, str] = {}
    for origin in reversed(model.__mro__):
        if not (issubclass(origin, BaseModel) and origin.model_fields):
            continue
        [of_class] = ast.parse(inspect.getsource(origin)).body
        assert isinstance(of_class, ast.ClassDef)
        for field, doc in zip(of_class.body, of_class.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = doc.value if isinstance(doc, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found[field.target.id] = " ".join(text.value.split())
    return found


def sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section with the path to it, a model before what stands in it."""
    yield path, model
    for name, field in model.model_fields.items():
        for inner, suffix in _models(field.annotation):
            yield from sections(inner, f"{path}.{name}{suffix}".lstrip("."))


def _models(kind: Any, suffix: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """The sections a type holds, with how a path goes on to them."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind, suffix
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _models(get_args(kind)[0], suffix)
    elif origin is tuple:
        yield from _models(get_args(kind)[0], suffix + "[]")
    elif origin is dict:
        yield from _models(get_args(kind)[1], suffix + ".NAME")
    elif origin in (Union, UnionType):
        for part in get_args(kind):
            yield from _models(part, suffix)


def worded(kind: Any, bounds: tuple[Any, ...] = ()) -> str:
    """A type as a reader of the page knows it."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return worded(inner[0], (*bounds, *inner[1:]))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is tuple:
        return f"list of {worded(inner[0])}".replace("list of section", "sections")
    if origin is dict:
        return f"{worded(inner[1])}, by name"
    if origin in (Union, UnionType):
        return " or ".join(word for word in (worded(part, bounds) for part in inner) if word)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "section"
    return WORDS.get(kind, "anything") + _bounded(bounds)


def _bounded(bounds: tuple[Any, ...]) -> str:
    flat = [part for bound in bounds for part in (bound.metadata if isinstance(bound, FieldInfo) else [bound])]
    words = [
        *(f"over {bound.gt}" for bound in flat if isinstance(bound, Gt)),
        *(f"{bound.ge} or more" for bound in flat if isinstance(bound, Ge)),
        *(f"{bound.le} at most" for bound in flat if isinstance(bound, Le)),
    ]
    return f" ({', '.join(words)})" if words else ""


def defaulting(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.default if field.default is not PydanticUndefined else None
    if field.default_factory is not None or value in (None, (), ""):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{int(value)}`" if isinstance(value, float) and value.is_integer() else f"`{value}`"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for path, model in sections(Config, ""):
        says = explained(model)
        if path:
            about = inspect.cleandoc(model.__doc__ or "").split("\n\n")[0].replace("\n", " ")
            parts.append(f"\n## `{path}`\n")
            parts += [f"\n{about}\n"] if model.__doc__ and about != inspect.getdoc(BaseModel) else []
        parts.append("\n| key | what | default | |\n| --- | --- | --- | --- |\n")
        for name, field in model.model_fields.items():
            kind = worded(field.annotation, tuple(field.metadata))
            parts.append(f"| `{name}` | {kind} | {defaulting(field)} | {says.get(name, '')} |\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
