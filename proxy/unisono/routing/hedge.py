"""Hedging: while a deployment sends no first token, a second one gets the same request.

The deployment that sends a token first gives the answer, and the request to the other deployment is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

from unisono.core.frozen import dataclass
from unisono.core.generation import Capabilities, Chunk, CompletionJob, Timeouts
from unisono.core.ports import Backend, PassthroughBackend
from unisono.core.probe import Probe
from unisono.core.tasks import cancel_all
from unisono.errors import BackendProtocolError, UnisonoError
from unisono.routing.deployment import LiveDeployment, SlotReservation

# Share of a group's requests that may be sent twice.
HEDGED_SHARE: Final = 0.048
# Maximum number of unused second requests that a group can save up, for a moment in which many requests stall.
MAX_SAVED: Final = 20.0
# Number of samples from which the usual time to the first token is known well enough.
MIN_SAMPLES: Final = 20
# Minimum wait in seconds before a second request. A shorter wait is not worth the additional load.
MIN_WAIT_S: Final = 0.05
# Maximum wait as a multiple of the 90th percentile. If one answer in twenty stalls, the 95th percentile is the time of
# a stalled answer.
MAX_P90S: Final = 3.0
# Number of chunks that are read ahead of the client.
READ_AHEAD: Final = 16


@dataclass(frozen=True, slots=True)
class HedgeRules:
    """Rules for when a second deployment also gets a request.

    The request is sent to the second deployment after `after_s` seconds without a first token. If `after_s` is None,
    the delay is the 95th percentile of the first deployment's times to the first token, but at most three times the
    90th percentile.
    """

    after_s: float | None = None

    def delay_s(self, live: LiveDeployment, unread_tokens: int) -> float | None:
        """Return the seconds to wait for the deployment `live`; None if there are too few samples.

        `unread_tokens` is the number of prompt tokens that are not cached.
        """
        if self.after_s is not None:
            return self.after_s
        learned = live.times.learned(live.clock())
        if len(live.times) < MIN_SAMPLES:
            return None
        first_s = min(learned.first_token_s, MAX_P90S * learned.first_token_p90_s)
        per_token_s = min(learned.s_per_token or 0.0, MAX_P90S * (learned.s_per_token_p90 or 0.0))
        return max(first_s, per_token_s * unread_tokens, MIN_WAIT_S)


class HedgeBudget:
    """Budget of a group for requests to a second deployment."""

    def __init__(self) -> None:
        self._balance = 1.0

    def add_request(self) -> None:
        self._balance = min(self._balance + HEDGED_SHARE, MAX_SAVED)

    def pay(self) -> bool:
        """Pay for a request to a second deployment; return False if the budget is used up."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True


class _Pump:
    """Reader of one stream in a task of its own, because a timeout cannot span several tasks."""

    def __init__(self, stream: AsyncIterator[Chunk]) -> None:
        self._queue: asyncio.Queue[Chunk | UnisonoError | None] = asyncio.Queue(READ_AHEAD)
        self.task = asyncio.create_task(self._read(stream), name="read a hedged answer")
        self.error: UnisonoError | None = None
        # Chunks up to the first token.
        self.begun: list[Chunk] = []

    async def _read(self, stream: AsyncIterator[Chunk]) -> None:
        end: UnisonoError | None = None
        try:
            async for chunk in stream:
                await self._queue.put(chunk)
        except UnisonoError as error:
            end = error
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()
        await self._queue.put(end)

    async def begin(self) -> None:
        """Read up to the first token; set `error` if the stream fails before the first token."""
        while True:
            item = await self._queue.get()
            if not isinstance(item, Chunk):
                self.error = item or BackendProtocolError("the backend ended its stream without a token")
                # `rest` raises the error.
                self._queue.put_nowait(item)
                return
            self.begun.append(item)
            if item.tokens or item.text or item.finish is not None:
                return

    async def rest(self) -> AsyncIterator[Chunk]:
        for chunk in self.begun:
            yield chunk
        while isinstance(item := await self._queue.get(), Chunk):
            yield item
        if item is not None:
            raise item


@dataclass(frozen=True, slots=True)
class HedgeActions:
    """Callbacks to the slot whose generation is hedged.

    `reserve` reserves a slot on a second deployment, or returns None. `switch` replaces the current slot with that
    slot. `failed` reports the failure of a deployment.
    """

    reserve: Callable[[], SlotReservation | None]
    switch: Callable[[SlotReservation], None]
    failed: Callable[[LiveDeployment, UnisonoError], None]


async def hedged(
    live: LiveDeployment, job: CompletionJob, delay_s: float, actions: HedgeActions
) -> AsyncGenerator[Chunk]:
    """Yield the chunks of `live`, or of a second deployment if its first token arrives earlier.

    The second deployment gets the job after `delay_s` seconds without a token of `live`.
    """
    # Both streams are read ahead, so `on_chunk` would handle a chunk before earlier chunks that wait to be yielded.
    job = replace(job, on_chunk=None)
    first, second, other = _Pump(live.backend.complete(job)), None, None
    loop = asyncio.get_running_loop()
    begun_at = loop.time()
    tasks: dict[asyncio.Task[None], _Pump] = {_task(first.begin()): first}
    try:
        await asyncio.wait(tasks, timeout=delay_s)
        if not first.begun and first.error is None and (other := actions.reserve()) is not None:
            second = _Pump(other.live.backend.complete(_remaining(job, loop.time() - begun_at)))
            tasks[_task(second.begin())] = second
        winner = await _winner(tasks)
        if second is not None and other is not None:
            if winner is second:
                actions.switch(other)
                if first.error is not None:
                    actions.failed(live, first.error)
            elif second.error is not None:
                actions.failed(other.live, second.error)
            # The client does not wait until the other request has ended.
            (second if winner is first else first).task.cancel()
            if winner is first:
                _give_back(other, job)
            other = None
        async for chunk in winner.rest():
            yield chunk
    finally:
        await cancel_all(*tasks, first.task, *([] if second is None else [second.task]))
        if other is not None:
            _give_back(other, job)


def _give_back(hold: SlotReservation, job: CompletionJob) -> None:
    """Release the slot of a cancelled request, and count the request against the rate limits."""
    hold.share.record_usage(len(job.prompt.tokens))
    hold.live.give_back(hold)


def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(work, name="wait for a first token")


def _remaining(job: CompletionJob, used_s: float) -> CompletionJob:
    """Return the job with a total time limit that is `used_s` seconds shorter."""
    total_s = max(job.timeouts.total_s - used_s, 0.0)
    return replace(job, timeouts=replace(job.timeouts, total_s=total_s))


async def _winner(tasks: dict[asyncio.Task[None], _Pump]) -> _Pump:
    """Return the first stream that sends a token; if all fail, the stream that started first."""
    waiting = set(tasks)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done and tasks[task].error is None:
                return tasks[task]
    return next(iter(tasks.values()))


class HedgedDeployment:
    """Deployment of a slot, as the engine sees it, whose generations are hedged.

    `live` returns the current deployment of the slot, and `complete` starts a hedged generation.
    """

    def __init__(
        self, live: Callable[[], LiveDeployment], complete: Callable[[CompletionJob], AsyncIterator[Chunk]]
    ) -> None:
        self._live = live
        self._complete = complete

    @property
    def name(self) -> str:
        return self._live().name

    @property
    def backend(self) -> Backend:
        return _HedgedBackend(self._live().backend, self._complete)

    @property
    def passing(self) -> PassthroughBackend:
        return self._live().passing

    @property
    def timeouts(self) -> Timeouts:
        return self._live().timeouts

    async def capabilities(self) -> Capabilities:
        return await self._live().capabilities()


class _HedgedBackend:
    def __init__(self, backend: Backend, complete: Callable[[CompletionJob], AsyncIterator[Chunk]]) -> None:
        self._backend = backend
        self.complete = complete

    async def probe(self) -> Probe:
        return await self._backend.probe()

    async def load(self) -> Any:
        return await self._backend.load()

    async def aclose(self) -> None:
        await self._backend.aclose()
