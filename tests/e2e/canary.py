"""A slow stream that runs beside whatever a test does, and tells how long it was ever kept waiting.

A gap counts by the clock, but no more than this process has worked in it: on a busy machine others take their time too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.e2e.gateway import Gateway

STEP_S = 0.02
"""How often its backend sends a token."""


class Canary:
    def __init__(self) -> None:
        self._last = _clocks()
        self._worst_s = 0.0
        self._heard = 0
        self._ended = False
        self.gaps_s: list[float] = []
        """Every one of them, by the clock alone."""

    async def listen(self, running: Gateway, model: str) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": "Sing"}], "stream": True}
        async with running.session.post(f"{running.url}/v1/chat/completions", json=body) as response:
            async for _ in response.content.iter_any():
                now = _clocks()
                passed_s, worked_s = now[0] - self._last[0], now[1] - self._last[1]
                self.gaps_s.append(passed_s)
                self._worst_s = max(self._worst_s, min(passed_s, worked_s))
                self._last = now
                self._heard += 1
        self._ended = True

    async def fresh(self) -> None:
        """Forget what was before, once it sings."""
        await self.heard_more(2)
        self._worst_s = 0.0

    async def worst_s(self) -> float:
        """The longest gap since `fresh`, in seconds; it still sings."""
        await self.heard_more(2)
        return self._worst_s

    async def heard_more(self, count: int) -> None:
        until = self._heard + count
        async with asyncio.timeout(10):
            while self._heard < until:
                assert not self._ended, "the canary fell silent"
                await asyncio.sleep(0.001)


def _clocks() -> tuple[float, float]:
    return time.monotonic(), time.process_time()


@asynccontextmanager
async def singing(running: Gateway, model: str) -> AsyncIterator[Canary]:
    canary = Canary()
    task = asyncio.create_task(canary.listen(running, model))
    try:
        yield canary
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
