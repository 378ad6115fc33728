"""Examples of the request types that an SDK declares, and the names of their kinds.

The tables of the suites are made from these, so that a kind that a new SDK adds fails a test before a user sends it.
"""

from __future__ import annotations

import collections.abc
import types
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin

from pydantic import BaseModel
from typing_extensions import get_type_hints, is_typeddict

Json = dict[str, Any]
# Script that answers with the prompt.
PROMPT = "the prompt"
WORD = "porcelain"
# One id for all, so that results and approvals find their calls.
ID = "call_1"
IDS = ("id", "call_id", "tool_use_id", "tool_call_id", "approval_request_id")
# Values of strings and objects that must have a form.
FORMS: Json = {"arguments": "{}", "parameters": {}} | dict.fromkeys(IDS, ID)
PLAIN: dict[Any, Any] = {bool: False, int: 1, float: 1.0}
# Fields whose values are combined with all other fields.
MULTIPLIED = ("role",)
MAX_DEPTH = 7


def members(annotation: Any) -> list[Any]:
    """Return the types of a union without None; a single type for anything else."""
    origin = get_origin(annotation)
    if origin in (Required, NotRequired) or hasattr(annotation, "__metadata__"):
        return members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [each for part in get_args(annotation) if part is not types.NoneType for each in members(part)]
    return [annotation]


def examples(annotation: Any, name: str = "", *, full: bool = False, depth: int = 0) -> list[Any]:
    """Return values of a type, together with every kind of every union in it.

    Objects have only their required fields, or all fields if `full`.
    """
    found: list[Any] = []
    for member in members(annotation):
        origin = get_origin(member)
        if is_typeddict(member):
            found += _objects(member, full=full, depth=depth)
        elif origin is Literal:
            found += get_args(member) if name in MULTIPLIED else get_args(member)[:1]
        elif origin is dict or (isinstance(member, type) and issubclass(member, BaseModel)):
            # A model is an answer of the SDK. The typed dictionary beside it has the same fields.
            found += [] if origin is None else [{}]
        elif isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
            found += [[each] for each in examples(get_args(member)[0], name, full=full, depth=depth)]
        elif member is str or member is object:
            found.append(FORMS.get(name, WORD))
        else:
            # A strict schema would need content.
            found.append(PLAIN.get(member, {}))
    return found or [{}]


def _objects(kind: Any, *, full: bool, depth: int) -> list[Json]:
    # `__required_keys__` is empty for types whose annotations are strings.
    hints = get_type_hints(kind, include_extras=True)
    hints = {field: hint for field, hint in hints.items() if full or get_origin(hint) is Required or field == "type"}
    if depth > MAX_DEPTH:
        hints = {field: hint for field, hint in hints.items() if get_origin(hint) is Required}
    values = {field: examples(hint, field, full=full, depth=depth + 1) for field, hint in hints.items()}
    multiplied = [field for field in MULTIPLIED if field in values]
    others = {field: each for field, each in values.items() if field not in multiplied}
    # Each value of each field once, not all combinations.
    rows = [
        {field: each[min(row, len(each) - 1)] for field, each in others.items()}
        for row in range(max(map(len, others.values()), default=1))
    ]
    return [
        dict(zip(multiplied, chosen, strict=True)) | row
        for row in rows
        for chosen in product(*(values[field] for field in multiplied))
    ]


def kind_name(kind: Any) -> str:
    """Return the value of `type` or `role` of a typed dictionary, or its name."""
    hints = get_type_hints(kind)
    for field in ("type", "role"):
        if get_origin(hints.get(field)) is Literal and len(get_args(hints[field])) == 1:
            return str(get_args(hints[field])[0])
    return str(kind.__name__)


def kind_names(annotation: Any, path: str, depth: int = 2, *, in_fields: bool = False) -> Iterator[str]:
    """Yield the kinds of a union and of the lists in them, such as `input message content input_text`.

    With `in_fields`, also the kinds of fields that are unions of objects.
    """
    for kind in filter(is_typeddict, members(annotation)):
        at = f"{path} {kind_name(kind)}"
        yield at
        for field, hint in get_type_hints(kind).items() if depth else ():
            for inner in members(hint):
                origin = get_origin(inner)
                if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
                    yield from kind_names(get_args(inner)[0], f"{at} {field}", depth - 1, in_fields=in_fields)
            if in_fields and sum(map(is_typeddict, members(hint))) > 1:
                yield from kind_names(hint, f"{at} {field}", depth - 1, in_fields=True)


def check_known(found: collections.abc.Iterable[str], known: Path) -> None:
    """Fail with the kinds that are not in the file of known kinds."""
    new = sorted(set(found) - set(known.read_text().splitlines()))
    assert not new, f"kinds that {known.name} does not have; add them after their tests pass:\n" + "\n".join(new)


def parts_in(item: Json, path: str) -> Iterator[tuple[str, Json]]:
    """Yield the typed parts in the lists of an item, with their positions."""
    for field in ("content", "output"):
        parts = item.get(field)
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict) and "type" in part:
                yield f"{path}.{field}.{index}", part
                yield from parts_in(part, f"{path}.{field}.{index}")


def words_in(value: Any) -> list[str]:
    """Return the texts of a value that a model could read."""
    if isinstance(value, dict):
        return [word for field, each in value.items() if field != "type" for word in words_in(each)]
    if isinstance(value, list):
        return [word for each in value for word in words_in(each)]
    return [value] if isinstance(value, str) else []
