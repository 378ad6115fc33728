"""What real engines say of their load, while they work and when they are done."""

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
SILENT = ("mlx_server",)


async def until(backend: Backend, running: int) -> Load:
    async with asyncio.timeout(60):
        while True:
            # An engine that was just given a prompt may take a while for anything else on so small a machine.
            with suppress(BackendTimeout):
                load = await backend.load()
                assert load is not None
                if load.running == running:
                    return load
            await asyncio.sleep(0.1)


async def test_an_engine_counts_what_it_generates(engine: Running, backend: Backend) -> None:
    if engine.engine.kind in SILENT:
        assert await backend.load() is None
        return
    # What the adapter starts itself says nothing before it runs.
    await backend.probe()

    async def endless(user: str) -> None:
        async for _ in backend.complete(replace(greedy(prompt_for(user), 2400), sampling=ENDLESS)):
            pass

    tasks = [asyncio.create_task(endless(user)) for user in ("Hello!", "Count to 30.")]
    try:
        load = await until(backend, 2)
        assert load.waiting == 0
        assert load.tokens is None or load.tokens > 0
        assert load.cache_used is None or 0 < load.cache_used < 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (await until(backend, 0)).waiting == 0
