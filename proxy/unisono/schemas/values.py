"""JSON values as JSON Schema sees them: of which type, when equal, and how to name one in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson

SHOWN = 60
"""Characters of a text that is repeated."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: Mapping[str, Callable[[object], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and (isinstance(value, int) or float(str(value)).is_integer()),
    "string": lambda value: isinstance(value, str),
}


def is_type(name: str, value: object) -> bool:
    """A whole number is an integer however it is written; true is no number."""
    return _TYPES[name](value)


def key(value: object, work: Callable[[], None]) -> object:
    """Something hashable that is equal for equal JSON: 1 and 1.0 are, 1 and true are not. Calls `work` for every value
    in it; recursive, so for values whose depth is bounded."""
    work()
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, list | tuple):
        return ("array", *(key(each, work) for each in value))
    if isinstance(value, Mapping):
        return frozenset((name, key(each, work)) for name, each in value.items())
    return value


def shown(value: object) -> str:
    """The value where it is short, else what kind of value it is."""
    if isinstance(value, str) and len(value) > SHOWN:
        return orjson.dumps(value[:SHOWN] + "...").decode()
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "an array"
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_long = isinstance(value, int) and abs(value) >= 10**SHOWN
        return f"a number of more than {SHOWN} digits" if is_long else str(value)[:SHOWN]
    return orjson.dumps(value).decode()
