"""Requests under way, so that they can be ended in order: what is answered still is told why it ends.

Part of the composition root. A request that has to end before its time ends in the shape its surface gives to failures:
the turns that run for it fail with `ShuttingDown`, as if a backend had. Turns that no request waits for, those of
background responses, are none of this module's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic

from unisono.core.events import Event
from unisono.engine.turn import GenerationRequest, GenerationService, GenerationStream
from unisono.engine.wrapped_stream import WrappedStream
from unisono.errors import ShuttingDown

AGAIN_S = 1.0
"""What a client is told to wait before it asks again, in seconds."""

QUIET_S = 1.0
"""After how long without a word nothing is taken to be on its way on a WebSocket, in seconds."""


def leaving() -> ShuttingDown:
    return ShuttingDown("The gateway is shutting down; ask again.", retry_after_s=AGAIN_S)


@dataclass(eq=False, slots=True)
class OpenRequest:
    """One request, or one WebSocket, from its first line to the end of its answer. `runs` are the turns that are
    generated for it now, `active_at` is when something was last said on a WebSocket, by the monotonic clock, and
    `ended` says that it was told to end."""

    task: asyncio.Task[object]
    socket: bool = False
    runs: set[DrainingStream] = field(default_factory=set)
    active_at: float = 0.0
    ended: bool = False

    def quiet(self) -> bool:
        """Whether it is a WebSocket on which nothing goes on: what a run has said is kept and told behind its end."""
        return self.socket and not self.runs and monotonic() - self.active_at > QUIET_S

    def fail_runs(self) -> None:
        """Have everything that is generated for it fail, in whatever way its surface shows that."""
        for run in list(self.runs):
            run.fail()

    def end(self) -> None:
        """End it from outside; whoever opened it sees a cancellation and `ended`."""
        if not self.ended:
            self.ended = True
            self.task.cancel()


OPEN: ContextVar[OpenRequest | None] = ContextVar("OPEN", default=None)
"""The request that whatever runs now, runs for; None for what runs by itself."""


class DrainingService(GenerationService):
    """Turns whose runs end with the request they are for."""

    def __init__(self, turns: GenerationService) -> None:
        self._turns = turns

    def start(self, turn: GenerationRequest) -> GenerationStream:
        run, request = self._turns.start(turn), OPEN.get()
        return run if request is None else DrainingStream(run, request)

    async def count(self, turn: GenerationRequest) -> int:
        return await self._turns.count(turn)


class DrainingStream(WrappedStream):
    """A run that can be made to fail from outside. Its batches are those of the run."""

    def __init__(self, run: GenerationStream, request: OpenRequest) -> None:
        super().__init__(run)
        self._request = request
        self._waiting: asyncio.Task[object] | None = None
        """Who waits for the next batch."""
        self._failed = asyncio.Event()

    def fail(self) -> None:
        """Raise `ShuttingDown` to whoever iterates, now or when the next batch is asked for."""
        if not self._failed.is_set():
            self._failed.set()
            if self._waiting is not None:
                self._waiting.cancel()

    async def _each(self) -> AsyncGenerator[list[Event]]:
        batches = aiter(self._run)
        self._request.runs.add(self)
        try:
            while True:
                if self._failed.is_set():
                    raise leaving()
                self._waiting = waiting = asyncio.current_task()
                try:
                    batch = await anext(batches)
                except StopAsyncIteration:
                    return
                except asyncio.CancelledError:
                    # Where the client left at the same moment, nobody reads the failure either.
                    if not self._failed.is_set() or waiting is None or waiting.uncancel():
                        raise
                    raise leaving() from None
                finally:
                    self._waiting = None
                yield batch
        finally:
            self._request.runs.discard(self)
