"""JSON values as JSON Schema defines them: types, equality, and short descriptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson

SHOWN = 60
"""Maximum characters of a quoted text."""


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
    """Return True if `value` has the JSON type `name`.

    A number with an integral value is an integer in any notation. Booleans are not numbers.
    """
    return _TYPES[name](value)


def key(value: object, work: Callable[[], None]) -> object:
    """Return a hashable that is equal for equal JSON: 1 and 1.0 are equal, 1 and true are not.

    Calls `work` for every nested value. Recursive: the depth of `value` must be bounded.
    """
    work()
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, list | tuple):
        return ("array", *(key(each, work) for each in value))
    if isinstance(value, Mapping):
        return frozenset((name, key(each, work)) for name, each in value.items())
    return value


def shown(value: object) -> str:
    """Return the value as text if it is short, or else its kind."""
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
