"""Conversion between the argument text of a call and the input object of the Messages API."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from unisono.core.json_syntax import json_kind

# Member name of the object that wraps invalid arguments.
UNPARSED: Final = "unparsed_arguments"


# Pattern of numbers that the parser would round.
LONG_NUMBER: Final = re.compile(r"\d{19}")


# Escape sequence of a lone surrogate. Many clients reject a body that contains such a sequence.
_LONE_SURROGATE: Final = re.compile(
    r"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F])"
)


def to_wire(arguments: str) -> Any:
    """Return a call's input for a JSON body. Long numbers stay exactly as the model wrote them."""
    value = to_input(arguments)
    return orjson.Fragment(arguments) if _is_beyond_orjson(value, arguments) else exact(value, arguments)


def _is_beyond_orjson(value: dict[str, Any], arguments: str) -> bool:
    """Return True for an object that orjson rejected only for its long numbers or its nesting."""
    is_rejected = value.keys() == {UNPARSED} and value[UNPARSED] == arguments
    return is_rejected and json_kind(arguments) is dict and _LONE_SURROGATE.search(arguments) is None


def exact(value: dict[str, Any], written: str) -> Any:
    """Return `value`, or the text `written` if it may contain numbers too long for orjson.

    `value` was parsed from `written`. A `value` that wraps invalid arguments is returned unchanged.
    """
    is_unparsed = value.keys() == {UNPARSED}
    return value if is_unparsed or not LONG_NUMBER.search(written) else orjson.Fragment(written)


def to_input(arguments: str) -> dict[str, Any]:
    """Parse the arguments. Text that is not a JSON object is wrapped in one."""
    if not arguments.strip():
        return {}
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {UNPARSED: arguments}


def to_json(arguments: str) -> str:
    """Return a call's input as JSON text for a stream: the model's own text if it is an object."""
    value = to_input(arguments)
    if not value:
        return arguments.strip()
    if value.keys() == {UNPARSED} and not _is_beyond_orjson(value, arguments):
        return orjson.dumps(value).decode()
    return arguments


def to_arguments(value: dict[str, Any]) -> str:
    """Restore the model's argument text from an object. Inverse of `to_input`."""
    if value.keys() == {UNPARSED} and isinstance(value[UNPARSED], str):
        return str(value[UNPARSED])
    return orjson.dumps(value).decode()
