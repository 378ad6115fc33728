"""Open requests, and their orderly end at shutdown with an error for the client.

If a request must end early, its generation streams fail with `ShuttingDown`, as if a backend had failed. The client
therefore gets an error in the format of its API. Streams of background responses belong to no request and are not
handled here.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic

from unisono.errors import ShuttingDown

# Retry delay sent to clients, in seconds.
AGAIN_S = 1.0

# Seconds without a message after which a WebSocket is idle.
QUIET_S = 1.0


def shutdown_error() -> ShuttingDown:
    return ShuttingDown("The gateway is shutting down; send the request again.", retry_after_s=AGAIN_S)


@dataclass(eq=False, slots=True)
class OpenRequest:
    """One request, or one WebSocket, from its first line to the end of its answer.

    `streams` are the generation streams in progress. `active_at` is the time of the last message on a WebSocket, by the
    monotonic clock. `ended` is True after `end` has cancelled the request.
    """

    task: asyncio.Task[object]
    socket: bool = False
    streams: set[Interruption] = field(default_factory=set)
    active_at: float = 0.0
    ended: bool = False

    def is_idle(self) -> bool:
        """Return True for an idle WebSocket, and False for any other request.

        A WebSocket becomes idle `QUIET_S` seconds after its last message. Until then, the result of a stream may still
        have to be stored and sent.
        """
        return self.socket and not self.streams and monotonic() - self.active_at > QUIET_S

    def fail_streams(self) -> None:
        """Make all generation streams of the request fail, so that the client gets an error."""
        for stream in list(self.streams):
            stream.fail()

    def end(self) -> None:
        """Cancel the request's task and set `ended`, which marks this cancellation as a shutdown."""
        if not self.ended:
            self.ended = True
            self.task.cancel()


# Request that the current task belongs to; None for a task that belongs to no request.
OPEN: ContextVar[OpenRequest | None] = ContextVar("OPEN", default=None)


class Interruption:
    """Interruption of a generation stream by the shutdown of the gateway.

    A stream without `request` is never interrupted.
    """

    # Rules.
    # - Only a wait for the next batch is interrupted. `waiting_task` is None while the consumer handles a batch.
    # - If `fail` is called while nothing waits, the next wait raises the error.

    __slots__ = ("_has_failed", "_request", "waiting_task")

    def __init__(self, request: OpenRequest | None) -> None:
        self._request = request
        self.waiting_task: asyncio.Task[object] | None = None
        self._has_failed = False

    def fail(self) -> None:
        """Raise `ShuttingDown` in the consumer while it waits for a batch: now, or the next time."""
        if not self._has_failed:
            self._has_failed = True
            if self.waiting_task is not None:
                self.waiting_task.cancel()

    def enter(self) -> None:
        """Add the stream to its request and begin to wait."""
        if self._request is not None:
            self._request.streams.add(self)
        self.resume()

    def resume(self) -> None:
        """Begin to wait for the next batch. Raises ShuttingDown if the grace period is over."""
        if self._request is not None:
            if self._has_failed:
                raise shutdown_error()
            self.waiting_task = asyncio.current_task()

    def leave(self) -> None:
        """Remove the stream, which has ended, from its request."""
        self.waiting_task = None
        if self._request is not None:
            self._request.streams.discard(self)

    def undo_cancellation(self) -> bool:
        """Return whether `fail` cancelled the wait; if so, undo the cancellation of the task."""
        task = self.waiting_task
        # If the client disconnected at the same moment, the cancellation stays, because no client can read the error.
        return self._has_failed and task is not None and not task.uncancel()
