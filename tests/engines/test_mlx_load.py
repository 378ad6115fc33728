"""Test of the load of the mlx backend with the demo model."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.engines.demo_prompts import greedy, prompt_for
from unisono.core.generation import Load
from unisono.core.ports import Backend, BackendOptions
from unisono.core.tasks import cancel_and_wait
from unisono_adapters.mlx.mlx_backend import MlxLocalBackend

pytestmark = pytest.mark.engine

ENDLESS_JOB = replace(greedy(prompt_for("Repeat la forever.")), max_tokens=2000)


async def until(backend: Backend, running: int, waiting: int) -> Load:
    async with asyncio.timeout(30):
        while True:
            load = await backend.load()
            if load is not None and (load.running, load.waiting) == (running, waiting):
                return load
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_load_counts_requests_and_does_not_start_the_engine() -> None:
    backend = MlxLocalBackend(BackendOptions("mlx", "demo", extra={"batch": 2}))
    assert await backend.load() is None
    assert backend.engine_pid is None

    async def generate() -> None:
        async for _ in backend.complete(ENDLESS_JOB):
            pass

    running = [asyncio.create_task(generate()) for _ in range(3)]
    try:
        load = await until(backend, 2, 1)
        assert load.tokens is not None
        assert load.tokens >= 2 * len(ENDLESS_JOB.prompt.tokens)
        for task in running:
            task.cancel()
        assert await until(backend, 0, 0) == Load(0, 0, 0)
    finally:
        await cancel_and_wait(*running)
        await backend.aclose()
    assert await backend.load() is None
