"""What became of one message to a tool server: whether it was sent, how it was answered, and how to leave it.

The protocol's SDK reports every failure as one kind of error. Whether a call may be repeated depends on what happened
at the wire, so the wire writes it down here; a context variable brings the record from the caller to the socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import anyio


@dataclass(slots=True, eq=False)
class Exchange:
    """One message. `problem` says in the gateway's own words what went wrong, and holds nothing secret."""

    sent: bool = False
    """At least its beginning may have reached the server."""
    status: int = 0
    """The HTTP status it was answered with, 0 for none."""
    ended: bool = False
    """The answer's stream has come to its end, or broke."""
    too_large: bool = False
    problem: str = ""
    over: Callable[[], object] | None = None
    """Called when a whole answer has been read."""
    arguments: str = ""
    """JSON that takes the place of the arguments in a call of a tool."""
    aside: bool = False
    """Nobody waits for an answer: it is given up after a moment, since others queue behind it."""
    _left: bool = False
    _scopes: list[anyio.CancelScope] = field(default_factory=list)

    @property
    def left(self) -> bool:
        return self._left

    def leave(self) -> None:
        """Nobody waits any more: let go of the connection at once."""
        self._left = True
        for scope in self._scopes:
            scope.cancel()

    @contextmanager
    def leaving(self) -> Iterator[anyio.CancelScope]:
        """What is done in here ends when the exchange is left; the scope then says `cancelled_caught`."""
        with anyio.CancelScope() as scope:
            self._scopes.append(scope)
            if self._left:
                scope.cancel()
            try:
                yield scope
            finally:
                self._scopes.remove(scope)


CALL: ContextVar[Exchange | None] = ContextVar("CALL", default=None)
"""The record of the request the running code is about to send."""
EXCHANGE: ContextVar[Exchange | None] = ContextVar("EXCHANGE", default=None)
"""The record of the message the running code puts on the wire."""
