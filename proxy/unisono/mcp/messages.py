"""Messages to tool servers: record of the exchange of each message, and serialization.

The SDK reports every failure as one kind of error. Whether a call may be repeated depends on what happened at the
transport, so the transport records it in an `Exchange`. A context variable carries the record from the caller to the
socket.

Tool call arguments are sent as the exact text from the model. The SDK cannot send raw text. It receives only the small
members of the arguments, which it copies into headers for servers that require this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import orjson
from mcp.shared.message import SessionMessage

from unisono.core.conversation import Json


class NoAnswer(Exception):
    """The server's answer ended without a response to its request."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Exchange:
    """Progress of one message to a tool server, and of its answer.

    `problem` describes the failure in the gateway's own words and contains no secrets. It is empty without a failure.
    """

    # True once the transport has begun to write the message: a part of it may have reached the server.
    sent: bool = False
    # HTTP status of the answer, 0 for none.
    status: int = 0
    # True once the stream of the answer has ended or failed.
    ended: bool = False
    is_too_large: bool = False
    problem: str = ""
    # Called once an answer that is not an event stream has been read to its end.
    on_complete: Callable[[], object] | None = None
    # JSON that replaces the arguments of a tool call.
    arguments: str = ""
    # True if no caller waits for an answer. Because later messages wait for this one, it is abandoned after
    # `McpLimits.aside_s`.
    aside: bool = False
    _is_aborted: bool = False
    _scopes: list[anyio.CancelScope] = field(default_factory=list)

    @property
    def is_aborted(self) -> bool:
        return self._is_aborted

    def abort(self) -> None:
        """Abort the exchange and release its connection immediately."""
        self._is_aborted = True
        for scope in self._scopes:
            scope.cancel()

    @contextmanager
    def cancelled_on_abort(self) -> Iterator[anyio.CancelScope]:
        """Cancel the enclosed code when the exchange is aborted.

        The scope then has `cancelled_caught` set.
        """
        with anyio.CancelScope() as scope:
            self._scopes.append(scope)
            if self._is_aborted:
                scope.cancel()
            try:
                yield scope
            finally:
                self._scopes.remove(scope)


# Record of the request that the running code is about to send.
CALL: ContextVar[Exchange | None] = ContextVar("CALL", default=None)
# Record of the message that the running code is transmitting.
EXCHANGE: ContextVar[Exchange | None] = ContextVar("EXCHANGE", default=None)


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
