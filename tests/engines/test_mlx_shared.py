"""One engine process for all who serve one model: started once, joined, mended once, and gone with the last of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.e2e.gateway import config_of
from tests.e2e.processes import children, lives
from tests.e2e.replicas import Client, replica
from tests.engines.demo_prompts import CHATS, ENCODING, greedy, prompt_for
from unisono.core.ports import BackendOptions
from unisono_adapters.mlx.local import MlxLocalBackend

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

USER, EXPECTED = CHATS["greeting"]
Backends = list[MlxLocalBackend]


@pytest_asyncio.fixture
async def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Backends]:
    monkeypatch.setenv("UNISONO_ENGINES", str(tmp_path))
    backends = [MlxLocalBackend(BackendOptions("mlx", "demo")) for _ in range(2)]
    yield backends
    for backend in backends:
        await backend.aclose()


async def greets(backend: MlxLocalBackend) -> bool:
    async with asyncio.timeout(60):
        chunks = [chunk async for chunk in backend.complete(greedy(prompt_for(USER)))]
    return ENCODING.decode([token for chunk in chunks for token in chunk.tokens]) == EXPECTED


async def gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while lives(pid):
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_who_wants_a_model_at_the_same_moment_gets_the_same_engine(two: Backends) -> None:
    assert await asyncio.gather(*map(greets, two)) == [True, True]
    first, second = two
    engine = first.engine_pid
    assert engine == second.engine_pid
    assert engine is not None
    await first.aclose()
    assert await greets(second)
    assert second.engine_pid == engine
    await second.aclose()
    await gone(engine)


@pytest.mark.slow
async def test_an_engine_that_dies_is_started_once_for_all(two: Backends) -> None:
    assert await asyncio.gather(*map(greets, two)) == [True, True]
    dead = two[0].engine_pid
    assert dead is not None
    os.kill(dead, signal.SIGKILL)
    await gone(dead)
    async with asyncio.timeout(20):
        while any(backend.engine_pid is not None for backend in two):
            await asyncio.sleep(0.02)
    assert await asyncio.gather(*map(greets, two)) == [True, True]
    assert two[0].engine_pid == two[1].engine_pid != dead


@pytest.mark.slow
async def test_other_limits_are_another_engine(two: Backends) -> None:
    other = MlxLocalBackend(BackendOptions("mlx", "demo", extra={"batch": 2}))
    try:
        assert await asyncio.gather(greets(two[0]), greets(other)) == [True, True]
        assert two[0].engine_pid != other.engine_pid
    finally:
        await other.aclose()


@pytest.mark.slow
async def test_workers_share_one_engine_that_outlives_whichever_of_them_is_killed(tmp_path: Path) -> None:
    config = config_of("mlx/demo", store={"url": f"sqlite://{tmp_path}/state.db"})
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(replica(tmp_path, config, "--workers", "2"))
        connector = aiohttp.TCPConnector(force_close=True)
        client = Client(one.url, await stack.enter_async_context(aiohttp.ClientSession(connector=connector)))
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
        for _ in range(4):
            await client.post("/v1/chat/completions", body)
        workers = children(one.pid)
        [(parent, engine)] = [(worker, child) for worker in workers for child in children(worker)]
        os.kill(parent, signal.SIGKILL)
        for _ in range(4):
            await client.post("/v1/chat/completions", body)
        assert lives(engine)
        await one.logged("another one is started")
        async with asyncio.timeout(60):
            while len(children(one.pid)) < 2 or parent in children(one.pid):
                await asyncio.sleep(0.1)
        for _ in range(4):
            await client.post("/v1/chat/completions", body)
        assert [child for worker in children(one.pid) for child in children(worker)] == []
        one.signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await one.ended() == 0
        await gone(engine)
