"""Test of cancelled operations of the Redis store: the caller sees the cancellation.

A task that swallows its cancellation would never end.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.contract.servers import Server
from unisono.core.state_store import BackgroundRun
from unisono.store.event_wait import Waiting
from unisono.store.redis import RedisStore
from unisono.store.redis.pubsub import Listener

# Maximum event loop steps that an operation takes while others run.
MAX_STEPS = 60


@pytest.mark.slow
async def test_cancellation_of_an_operation_is_not_swallowed(tmp_path: Path) -> None:
    server = Server(tmp_path).start()
    try:
        store = RedisStore(server.url, deadline_s=5.0)
        await store.start()

        async def watch_run() -> bool:
            await store.watch(BackgroundRun("tenant", "resp_1"), 1.0)
            task = asyncio.current_task()
            return bool(task and task.cancelling())

        async def keep_busy() -> None:
            while not is_finished:
                await store.check()

        is_finished = False
        others = [asyncio.create_task(keep_busy()) for _ in range(20)]
        cancelled = 0
        for steps in list(range(MAX_STEPS)) * 10:
            task = asyncio.create_task(watch_run())
            for _ in range(steps):
                await asyncio.sleep(0)
            cancelled += task.cancel()
            [result] = await asyncio.gather(task, return_exceptions=True)
            assert result is False or isinstance(result, asyncio.CancelledError)
        is_finished = True
        await asyncio.gather(*others)
        assert cancelled > 100
        await store.aclose()
    finally:
        server.end()


async def test_closing_a_listener_ends_it_though_its_connection_breaks_at_the_same_time() -> None:
    class Subscription:
        async def subscribe(self, *channels: str) -> None:
            pass

        async def get_message(self, timeout: float) -> None:
            try:
                await asyncio.sleep(timeout)
            except asyncio.CancelledError as cancelled:
                raise ConnectionError("closed") from cancelled

        async def aclose(self) -> None:
            pass

    async def connect() -> Any:
        return Subscription()

    listener = Listener(connect, Waiting())
    listener.subscribe("channel")
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(listener.aclose())
    done, _ = await asyncio.wait({closing}, timeout=5)
    assert done
