"""What the mlx backend says of its load while mlx-lm runs the demo model."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.engines.demo_prompts import greedy, prompt_for
from unisono.core.generation import Load
from unisono.core.ports import Backend, BackendOptions
from unisono.core.tasks import cancel_and_wait
from unisono_adapters.mlx.local import MlxLocalBackend

pytestmark = pytest.mark.engine

FOREVER = replace(greedy(prompt_for("Repeat la forever.")), max_tokens=2000)


async def until(backend: Backend, running: int, waiting: int) -> Load:
    async with asyncio.timeout(30):
        while True:
            load = await backend.load()
            if load is not None and (load.running, load.waiting) == (running, waiting):
                return load
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_an_engine_counts_what_it_runs_and_what_waits_and_is_not_started_to_say_so() -> None:
    backend = MlxLocalBackend(BackendOptions("mlx", "demo", extra={"batch": 2}))
    assert await backend.load() is None
    assert backend.engine_pid is None

    async def endless() -> None:
        async for _ in backend.complete(FOREVER):
            pass

    running = [asyncio.create_task(endless()) for _ in range(3)]
    try:
        load = await until(backend, 2, 1)
        assert load.tokens is not None
        assert load.tokens >= 2 * len(FOREVER.prompt.tokens)
        for task in running:
            task.cancel()
        assert await until(backend, 0, 0) == Load(0, 0, 0)
    finally:
        await cancel_and_wait(*running)
        await backend.aclose()
    assert await backend.load() is None
