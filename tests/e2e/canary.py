"""Slow stream that runs during a test and measures the longest gap between its chunks.

A gap counts in wall time, but at most the CPU time of this process in it: on a busy machine, other processes take CPU
time too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.e2e.gateway import Gateway

# Interval between the tokens of its backend.
STEP_S = 0.02


class Canary:
    """Client of the slow stream, with the gaps between its chunks."""

    def __init__(self) -> None:
        self._last = _clocks()
        self._worst_s = 0.0
        self._chunks = 0
        self._is_ended = False
        # All gaps, in wall time only.
        self.gaps_s: list[float] = []

    async def listen(self, running: Gateway, model: str) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": "Sing"}], "stream": True}
        async with running.session.post(f"{running.url}/v1/chat/completions", json=body) as response:
            async for _ in response.content.iter_any():
                now = _clocks()
                passed_s, worked_s = now[0] - self._last[0], now[1] - self._last[1]
                self.gaps_s.append(passed_s)
                self._worst_s = max(self._worst_s, min(passed_s, worked_s))
                self._last = now
                self._chunks += 1
        self._is_ended = True

    async def fresh(self) -> None:
        """Discard the gaps so far, once two more chunks have arrived."""
        await self.heard_more(2)
        self._worst_s = 0.0

    async def worst_s(self) -> float:
        """Return the longest gap since `fresh`, in seconds, once two more chunks have arrived."""
        await self.heard_more(2)
        return self._worst_s

    async def heard_more(self, count: int) -> None:
        """Wait for more chunks. Fails if the stream has ended."""
        target = self._chunks + count
        async with asyncio.timeout(10):
            while self._chunks < target:
                assert not self._is_ended, "the canary stream has ended"
                await asyncio.sleep(0.001)


def _clocks() -> tuple[float, float]:
    """Return wall time and CPU time."""
    return time.monotonic(), time.process_time()


@asynccontextmanager
async def singing(running: Gateway, model: str) -> AsyncIterator[Canary]:
    """Run a canary stream for the duration of the context."""
    canary = Canary()
    task = asyncio.create_task(canary.listen(running, model))
    try:
        yield canary
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
