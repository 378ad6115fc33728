"""Arguments of a call as this API has them: an object, where the model writes text."""

from __future__ import annotations

from typing import Any, Final

import orjson

UNPARSED: Final = "unparsed_arguments"
"""The one member of an object that stands for arguments which are none."""


def to_input(arguments: str) -> dict[str, Any]:
    """What a client reads; text that is no JSON object is handed over in one."""
    if not arguments.strip():
        return {}
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {UNPARSED: arguments}


def to_json(arguments: str) -> str:
    """The same as a stream tells it: the model's own bytes where they are an object."""
    value = to_input(arguments)
    if not value:
        return arguments.strip()
    return orjson.dumps(value).decode() if value.keys() == {UNPARSED} else arguments


def to_arguments(given: dict[str, Any]) -> str:
    """What the model wrote, as far as the object tells; the other way of `to_input`."""
    if given.keys() == {UNPARSED} and isinstance(given[UNPARSED], str):
        return str(given[UNPARSED])
    return orjson.dumps(given).decode()
