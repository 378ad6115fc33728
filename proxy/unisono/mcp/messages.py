"""Serialization of messages, with tool call arguments as the exact text from the model.

The SDK cannot send raw text. It receives only the small members of the arguments, which it copies into headers for
servers that require this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from mcp.shared.message import SessionMessage

from unisono.core.conversation import Json
from unisono.mcp.exchange import Exchange

CALL_METHOD: Final = "tools/call"
MIRRORED_LEVELS: Final = 8
MIRRORED_CHARACTERS: Final = 8 * 1024
MIRRORED_DIGITS: Final = 400


@dataclass
class OutgoingMessage(SessionMessage):
    """Message with the record of its exchange."""

    exchange: Exchange = field(default_factory=Exchange)


def encoded(message: Mapping[str, Any], arguments: str) -> bytes:
    """Serialize a JSON-RPC message.

    `arguments` is JSON text that replaces the arguments of a tool call. If it is empty, the message stays unchanged.
    """
    if arguments and message.get("method") == CALL_METHOD:
        params = {**message["params"], "arguments": orjson.Fragment(arguments)}
        message = {**message, "params": params}
    return orjson.dumps(message)


def mirrorable(members: Mapping[str, Json], levels: int = MIRRORED_LEVELS) -> dict[str, Json]:
    """Return the members that fit in a header.

    These are short strings, numbers, booleans, and objects that contain such members.
    """
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
