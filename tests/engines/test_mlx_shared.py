"""Tests of the shared engine process: one per model, ended with its last user."""

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
from unisono_adapters.mlx.mlx_backend import MlxLocalBackend

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

USER, EXPECTED = CHATS["greeting"]
Backends = list[MlxLocalBackend]


@pytest_asyncio.fixture
async def backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Backends]:
    monkeypatch.setenv("UNISONO_ENGINES", str(tmp_path))
    created = [MlxLocalBackend(BackendOptions("mlx", "demo")) for _ in range(2)]
    yield created
    for backend in created:
        await backend.aclose()


async def answers_greeting(backend: MlxLocalBackend) -> bool:
    async with asyncio.timeout(60):
        chunks = [chunk async for chunk in backend.complete(greedy(prompt_for(USER)))]
    return ENCODING.decode([token for chunk in chunks for token in chunk.tokens]) == EXPECTED


async def wait_until_gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while lives(pid):
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_concurrent_backends_share_one_engine(backends: Backends) -> None:
    assert await asyncio.gather(*map(answers_greeting, backends)) == [True, True]
    first, second = backends
    engine = first.engine_pid
    assert engine == second.engine_pid
    assert engine is not None
    await first.aclose()
    assert await answers_greeting(second)
    assert second.engine_pid == engine
    await second.aclose()
    await wait_until_gone(engine)


@pytest.mark.slow
async def test_dead_engine_is_restarted_once_for_all_backends(backends: Backends) -> None:
    assert await asyncio.gather(*map(answers_greeting, backends)) == [True, True]
    engine = backends[0].engine_pid
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    await wait_until_gone(engine)
    async with asyncio.timeout(20):
        while any(backend.engine_pid is not None for backend in backends):
            await asyncio.sleep(0.02)
    assert await asyncio.gather(*map(answers_greeting, backends)) == [True, True]
    assert backends[0].engine_pid == backends[1].engine_pid != engine


@pytest.mark.slow
async def test_different_limits_need_separate_engines(backends: Backends) -> None:
    other = MlxLocalBackend(BackendOptions("mlx", "demo", extra={"batch": 2}))
    try:
        assert await asyncio.gather(answers_greeting(backends[0]), answers_greeting(other)) == [True, True]
        assert backends[0].engine_pid != other.engine_pid
    finally:
        await other.aclose()


@pytest.mark.slow
async def test_workers_share_one_engine_that_survives_a_killed_worker(tmp_path: Path) -> None:
    config = config_of("mlx/demo", store={"url": f"sqlite://{tmp_path}/state.db"})
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(replica(tmp_path, config, "--workers", "2"))
        connector = aiohttp.TCPConnector(force_close=True)
        client = Client(gateway.url, await stack.enter_async_context(aiohttp.ClientSession(connector=connector)))
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
        for _ in range(4):
            await client.post("/v1/chat/completions", body)
        workers = children(gateway.pid)
        [(parent, engine)] = [(worker, child) for worker in workers for child in children(worker)]
        os.kill(parent, signal.SIGKILL)
        for _ in range(4):
            await client.post("/v1/chat/completions", body)
        assert lives(engine)
        await gateway.logged("another one is started")
        async with asyncio.timeout(60):
            while len(children(gateway.pid)) < 2 or parent in children(gateway.pid):
                await asyncio.sleep(0.1)
        for _ in range(4):
            await client.post("/v1/chat/completions", body)
        assert [child for worker in children(gateway.pid) for child in children(worker)] == []
        gateway.signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await gateway.ended() == 0
        await wait_until_gone(engine)
