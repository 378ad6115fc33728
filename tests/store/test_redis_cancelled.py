"""Whoever calls off an operation of the shared store sees it called off, at whatever moment: a task that goes on as if
nothing had been said never ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.contract.servers import Server
from unisono.core.state_store import BackgroundRun
from unisono.store.redis import RedisStore

LONGEST = 60
"""Steps of the event loop that an operation takes at most while others go on."""


@pytest.mark.slow
async def test_an_operation_that_is_cancelled_never_ends_as_if_it_were_not(tmp_path: Path) -> None:
    server = Server(tmp_path).start()
    try:
        store = RedisStore(server.url, deadline_s=5.0)
        await store.start()

        async def watched() -> bool:
            await store.watch(BackgroundRun("tenant", "resp_1"), 1.0)
            task = asyncio.current_task()
            return bool(task and task.cancelling())

        async def busy() -> None:
            while not over:
                await store.check()

        over = False
        others = [asyncio.create_task(busy()) for _ in range(20)]
        cut = 0
        for steps in list(range(LONGEST)) * 10:
            task = asyncio.create_task(watched())
            for _ in range(steps):
                await asyncio.sleep(0)
            cut += task.cancel()
            [ended] = await asyncio.gather(task, return_exceptions=True)
            assert ended is False or isinstance(ended, asyncio.CancelledError)
        over = True
        await asyncio.gather(*others)
        assert cut > 100
        await store.aclose()
    finally:
        server.end()
