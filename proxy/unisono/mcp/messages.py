"""Messages as bytes: the arguments of a call are sent as the text that the model wrote, which the SDK cannot do.

The SDK gets the small members only, for the headers that some servers want them in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
from mcp.shared.message import SessionMessage

from unisono.core.conversation import Json

CALL_METHOD: Final = "tools/call"
MIRRORED_LEVELS: Final = 8
MIRRORED_CHARACTERS: Final = 8 * 1024
MIRRORED_DIGITS: Final = 400


@dataclass
class OutgoingMessage(SessionMessage):
    """A message with JSON for the arguments of the call that it is."""

    arguments: str = ""


def encoded(message: Mapping[str, Any], arguments: str) -> bytes:
    """A JSON-RPC message; `arguments` are JSON for a call of a tool, or empty."""
    if arguments and message.get("method") == CALL_METHOD:
        params = {**message["params"], "arguments": orjson.Fragment(arguments)}
        message = {**message, "params": params}
    return orjson.dumps(message)


def mirrorable(members: Mapping[str, Json], levels: int = MIRRORED_LEVELS) -> dict[str, Json]:
    """The members that fit in a header: short strings, numbers and constants, and objects that hold such members."""
    small: dict[str, Json] = {}
    for name, value in members.items():
        if isinstance(value, dict):
            if levels > 1:
                small[name] = mirrorable(value, levels - 1)
        elif isinstance(value, str):
            if len(value) <= MIRRORED_CHARACTERS:
                small[name] = value
        elif isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**MIRRORED_DIGITS):
            small[name] = value
    return small
