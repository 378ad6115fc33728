"""Validation of a parsed configuration. One exception reports all errors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import field
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import ValidationError

from unisono.config.model_registry import ModelRegistry
from unisono.config.root_config import Config
from unisono.core.frozen import dataclass
from unisono.core.json_syntax import is_well_formed
from unisono.errors import ConfigError, well_formed

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

PROVIDER = "provider"
"""Field of `LitellmParams` that contains the keys that are passed to litellm."""

_ELEMENT = re.compile(r"\b(model_list|guardrails)\[(\d+)\]")

KEY = "[key]"
"""Last part of pydantic's error location if a key is invalid, and not its value."""

# Names of types in pydantic's error locations, such as `constrained-str`. Keys in the file do not have this form.
_TYPE = re.compile(r"str|int|float|bool|date|none|.*[^a-z0-9_].*")

# Paths of values that may define the name or mode of a model, or the name of a tool server. If such a value is invalid,
# references to the name cannot be checked.
_NAMING = re.compile(
    r"model_list(?!\[\d+\]\.litellm_params\.(?!model$))|mcp_servers(?!\.[^.]+\.)|router_settings\.model_group_alias"
)


@dataclass(frozen=True, slots=True)
class FilePositions:
    """Mapping of list indices in the validated configuration to those in the file.

    The indices differ because the loader leaves out elements without effect. `left_out` maps the name of a list to the
    indices of these elements in the file, from 0.
    """

    left_out: Mapping[str, Set[int]] = field(default_factory=dict)

    def in_file(self, message: str) -> str:
        """Replace the list indices in a message about the configuration with those in the file."""
        return _ELEMENT.sub(self._element, message) if self.left_out else message

    def _element(self, found: re.Match[str]) -> str:
        position, missing = int(found[2]), self.left_out.get(found[1], frozenset())
        for index in sorted(missing):
            position += index <= position
        return f"{found[1]}[{position}]"


Place: TypeAlias = tuple[int | str, ...]
"""Keys and list indices that lead to a value in the file."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """Error that pydantic found at `place`.

    If the error occurred inside a value with several possible types, `union` is the place of this value. Otherwise,
    `union` is None.
    """

    place: Place
    text: str
    union: Place | None = None


def validated(tree: object, errors: Sequence[str], positions: FilePositions) -> Config:
    """Return the validated configuration.

    `errors` are errors that were found before. Raises ConfigError if there are such errors, or if the validation finds
    errors. The exception contains all these errors, and the errors of references between the sections.
    """
    found = {line.partition(":")[0]: line for line in errors}
    faults: dict[Place, str] = {}
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        # The input is excluded, because it may contain a secret.
        details = error.errors(include_url=False, include_input=False, include_context=False)
        faults = _errors_by_place([_fault(each, tree) for each in details])
        # Report one error per key, although pydantic reports an error for each type that a value may have.
        for place, text in faults.items():
            path = positions.in_file(_path(place))
            found.setdefault(path, f"{path}: {text}")
    if found:
        raise ConfigError(
            *dict.fromkeys((*errors, *found.values(), *_reference_errors(tree, [*faults], [*found], positions)))
        )
    return config


def _fault(error: ErrorDetails, tree: object) -> _Fault:
    """Return an error of pydantic with its place in the file.

    In pydantic's error location, names of possible types and `[key]` are not keys in the file. They are left out.
    """
    node: Any = tree
    place: Place = ()
    union = None
    for part in error["loc"]:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            if part == KEY or (isinstance(part, str) and _TYPE.fullmatch(part)):
                union = place if union is None and part != KEY else union
                continue
        place += (part,)
    if error["type"] == "extra_forbidden":
        return _Fault(place, f"unknown key `{place[-1]}`; remove it", union)
    sentence = _sentence(error["msg"])
    return _Fault(place, f"the key is not valid: {sentence}" if error["loc"][-1] == KEY else sentence, union)


def _errors_by_place(faults: Sequence[_Fault]) -> dict[Place, str]:
    """Return one error text for each place.

    A value may have several possible types, and pydantic reports an error for each type. If one of these errors is
    about a part of the value, its type fits best, and the errors about the whole value are left out. Otherwise, the
    errors of all types are joined to one text.
    """
    inside = {fault.union for fault in faults if fault.union is not None and fault.place != fault.union}
    found: dict[Place, str] = {}
    for fault in faults:
        if fault.union is not None and fault.place == fault.union:
            if fault.union not in inside:
                known = found.get(fault.place)
                found[fault.place] = fault.text if known is None else f"{known}; or {fault.text}"
        else:
            found.setdefault(fault.place, fault.text)
    return found


def _reference_errors(
    tree: object, places: Collection[Place], paths: Iterable[str], positions: FilePositions
) -> Sequence[str]:
    """Return the errors of references between the sections, although there are other errors.

    `places` are the places of the values that the validation has rejected. They are replaced by their defaults. `paths`
    are the paths of all other errors. The result is empty if a rejected value has no default, or if another error may
    concern a name to which references refer.
    """
    if any(map(_NAMING.match, paths)) or any(not isinstance(place[-1], str) for place in places):
        return ()
    try:
        ModelRegistry(Config.model_validate(reduce(_without, places, tree)))
    except ConfigError as error:
        return [positions.in_file(message) for message in error.messages]
    except ValidationError:
        pass  # a required value is invalid
    return ()


def _without(tree: Any, place: Place) -> Any:
    """Return a copy of `tree` without the value at `place`."""
    first, *rest = place
    if isinstance(tree, Mapping):
        inner = {first: _without(tree[first], tuple(rest))} if rest and first in tree else {}
        return {key: value for key, value in tree.items() if key != first} | inner
    if isinstance(tree, Sequence) and not isinstance(tree, str) and rest:
        return [_without(value, tuple(rest)) if index == first else value for index, value in enumerate(tree)]
    return tree


def _path(loc: Sequence[int | str]) -> str:
    text = ""
    for part in loc:
        if part == PROVIDER:
            # In the file, the keys in `provider` are one level up.
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def _sentence(message: str) -> str:
    # Lists are validated as tuples, and mappings as objects, but users of YAML only know lists and mappings.
    message = message.removeprefix("Value error, ").replace("a valid tuple", "a list")
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", message)
    return message[:1].lower() + message[1:]


def refuse_lone_surrogates(value: object, path: str) -> None:
    """Raise ConfigError if a text in `value` is not valid Unicode and cannot be sent."""
    match value:
        case str() if not is_well_formed(value):
            raise ConfigError(f"{path}: the text is not valid Unicode; remove unpaired surrogates and non-UTF-8 bytes")
        case Mapping():
            for key, inner in value.items():
                key_path = f"{path}.{key}".lstrip(".")
                # The key itself may be the invalid text, but the error message must be valid Unicode.
                refuse_lone_surrogates(key, well_formed(key_path))
                refuse_lone_surrogates(inner, key_path)
        case list():
            for index, inner in enumerate(value):
                refuse_lone_surrogates(inner, f"{path}[{index}]")
