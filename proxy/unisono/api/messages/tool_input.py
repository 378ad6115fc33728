"""Conversion between the argument text of a call and the input object of the Messages API."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from unisono.api.tool_calls import to_value

# Member name of the object that wraps invalid arguments.
UNPARSED: Final = "unparsed_arguments"


# Pattern of numbers that the parser would round.
LONG_NUMBER: Final = re.compile(r"\d{19}")


def to_wire(arguments: str) -> Any:
    """Return a call's input for a JSON body. Long numbers stay exactly as the model wrote them."""
    value = to_input(arguments)
    return orjson.Fragment(arguments) if LONG_NUMBER.search(arguments) and not is_wrapped(value) else value


def is_wrapped(value: dict[str, Any]) -> bool:
    """Return whether an input is an object that wraps arguments as text."""
    return value.keys() == {UNPARSED} and isinstance(value[UNPARSED], str)


def to_input(arguments: str) -> dict[str, Any]:
    """Parse arguments. Wrap text that is not a JSON object, or that no request may contain."""
    value = to_value(arguments)
    return value if isinstance(value, dict) else {UNPARSED: arguments}


def to_json(arguments: str) -> str:
    """Return a call's input as JSON text for a stream: the model's own text if it is an object."""
    value = to_input(arguments)
    if not value:
        return arguments.strip()
    return orjson.dumps(value).decode() if is_wrapped(value) else arguments


def to_arguments(value: dict[str, Any]) -> str:
    """Restore the model's argument text from an object. Inverse of `to_input`."""
    if is_wrapped(value):
        return str(value[UNPARSED])
    return orjson.dumps(value).decode()
