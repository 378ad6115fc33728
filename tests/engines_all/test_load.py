"""Load reported by real engines, while they generate and afterwards."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.engines.demo_prompts import greedy, prompt_for
from tests.engines_all.engines import Running
from unisono.core.generation import CALL, ENDOFTEXT, RETURN, Load, Sampling
from unisono.core.ports import Backend
from unisono.errors import BackendTimeout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

ENDLESS = Sampling(temperature=0, logit_bias=dict.fromkeys((RETURN, CALL, ENDOFTEXT), -100.0))
WITHOUT_LOAD = ("mlx_server",)


async def load_with(backend: Backend, running: int) -> Load:
    async with asyncio.timeout(60):
        while True:
            # On a small machine, an engine with a new prompt may take a while to report its load.
            with suppress(BackendTimeout):
                load = await backend.load()
                assert load is not None
                if load.running == running:
                    return load
            await asyncio.sleep(0.1)


async def test_an_engine_reports_its_running_requests(engine: Running, backend: Backend) -> None:
    if engine.engine.kind in WITHOUT_LOAD:
        assert await backend.load() is None
        return
    # An engine that the adapter starts has no load before it runs.
    await backend.probe()

    async def endless(user: str) -> None:
        async for _ in backend.complete(replace(greedy(prompt_for(user), 2400), sampling=ENDLESS)):
            pass

    tasks = [asyncio.create_task(endless(user)) for user in ("Hello!", "Count to 30.")]
    try:
        load = await load_with(backend, 2)
        assert load.waiting == 0
        assert load.tokens is None or load.tokens > 0
        assert load.cache_used is None or 0 < load.cache_used < 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (await load_with(backend, 0)).waiting == 0
