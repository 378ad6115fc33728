"""JSON values as JSON Schema defines them: types, equality, and short quotes for messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson

# Maximum characters of a quoted string, and digits of a quoted integer.
MAX_QUOTED = 60


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: Mapping[str, Callable[[object], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "number": is_number,
    "integer": lambda value: is_number(value) and (isinstance(value, int) or float(str(value)).is_integer()),
    "string": lambda value: isinstance(value, str),
}


def is_type(name: str, value: object) -> bool:
    """Return True if `value` has the JSON type `name`.

    A number with an integral value is an integer in any notation. Booleans are not numbers.
    """
    return _TYPES[name](value)


def hashable(value: object, count_step: Callable[[], None]) -> object:
    """Return a hashable object that is equal for equal JSON values.

    1 and 1.0 are equal, 1 and true are not. Calls `count_step` for every nested value. The function is recursive, so
    the depth of `value` must be limited.
    """
    count_step()
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, list | tuple):
        return ("array", *(hashable(item, count_step) for item in value))
    if isinstance(value, Mapping):
        return frozenset((name, hashable(item, count_step)) for name, item in value.items())
    return value


def quoted(value: object) -> str:
    """Return a value as short text for a message.

    This is the JSON of a short value, the beginning of a long string, or only the kind of any other value.
    """
    if isinstance(value, str) and len(value) > MAX_QUOTED:
        return orjson.dumps(value[:MAX_QUOTED] + "...").decode()
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "an array"
    if is_number(value):
        is_long = isinstance(value, int) and abs(value) >= 10**MAX_QUOTED
        return f"a number of more than {MAX_QUOTED} digits" if is_long else str(value)[:MAX_QUOTED]
    return orjson.dumps(value).decode()
