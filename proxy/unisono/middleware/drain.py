"""Open requests, and their orderly end at shutdown with an error for the client.

Part of the composition root. A request that must end early fails in the error format of its API surface: its
generation streams fail with `ShuttingDown`, as if a backend had failed. Streams of background responses belong to no
request and are not handled here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic

from unisono.core.events import Event
from unisono.engine.request import GenerationRequest, GenerationService, GenerationStream, WrappedStream
from unisono.errors import ShuttingDown

# Retry delay sent to clients, in seconds.
AGAIN_S = 1.0

# Silence after which a WebSocket counts as idle, in seconds.
QUIET_S = 1.0


def shutdown_error() -> ShuttingDown:
    return ShuttingDown("The gateway is shutting down; ask again.", retry_after_s=AGAIN_S)


@dataclass(eq=False, slots=True)
class OpenRequest:
    """One request, or one WebSocket, from its first line to the end of its answer.

    `streams` are its current generation streams. `active_at` is the time of the last message on a WebSocket, by the
    monotonic clock. `ended` is True once the request was cancelled from outside.
    """

    task: asyncio.Task[object]
    socket: bool = False
    streams: set[DrainingStream] = field(default_factory=set)
    active_at: float = 0.0
    ended: bool = False

    def is_idle(self) -> bool:
        """Return True for an idle WebSocket.

        The quiet period lets a finished stream's result be stored and sent.
        """
        return self.socket and not self.streams and monotonic() - self.active_at > QUIET_S

    def fail_streams(self) -> None:
        """Make all generation streams of the request fail; its API surface reports the error."""
        for stream in list(self.streams):
            stream.fail()

    def end(self) -> None:
        """Cancel the request's task; the code that opened it sees the cancellation and `ended`."""
        if not self.ended:
            self.ended = True
            self.task.cancel()


# Request that the current task works for; None for independent tasks.
OPEN: ContextVar[OpenRequest | None] = ContextVar("OPEN", default=None)


class DrainingService(GenerationService):
    """Generation service whose streams end with their request."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    def start(self, generation_request: GenerationRequest) -> GenerationStream:
        stream, request = self._service.start(generation_request), OPEN.get()
        return stream if request is None else DrainingStream(stream, request)

    async def count(self, request: GenerationRequest) -> int:
        return await self._service.count(request)


class DrainingStream(WrappedStream):
    """Generation stream that can be made to fail from outside."""

    def __init__(self, stream: GenerationStream, request: OpenRequest) -> None:
        super().__init__(stream)
        self._request = request
        # Task that waits for the next batch.
        self._read_task: asyncio.Task[object] | None = None
        self._failed = asyncio.Event()

    def fail(self) -> None:
        """Raise `ShuttingDown` in the consumer, now or at its next batch."""
        if not self._failed.is_set():
            self._failed.set()
            if self._read_task is not None:
                self._read_task.cancel()

    async def _each(self) -> AsyncGenerator[list[Event]]:
        batches = aiter(self._stream)
        self._request.streams.add(self)
        try:
            while True:
                if self._failed.is_set():
                    raise shutdown_error()
                self._read_task = waiting = asyncio.current_task()
                try:
                    batch = await anext(batches)
                except StopAsyncIteration:
                    return
                except asyncio.CancelledError:
                    # If the client left at the same moment, the failure has no reader either.
                    if not self._failed.is_set() or waiting is None or waiting.uncancel():
                        raise
                    raise shutdown_error() from None
                finally:
                    self._read_task = None
                yield batch
        finally:
            self._request.streams.discard(self)
