"""Several workers on one port: connections are shared, deaths are mended, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.gateway import config_of
from tests.e2e.processes import children, holdings, lives
from tests.e2e.replicas import Replica, replica
from tests.fakes import FakeVllm
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.timeout(180)

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>" + "la " * 40 + "<|return|>")
CHAT: dict[str, Any] = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
SOON_S = 20.0


@dataclass
class Team:
    """A supervisor and its two workers."""

    one: Replica
    fake: FakeVllm
    session: aiohttp.ClientSession

    @property
    def workers(self) -> list[int]:
        return children(self.one.pid)

    async def chat(self, *, stream: bool = False) -> str:
        async with self.session.post(f"{self.one.url}/v1/chat/completions", json={**CHAT, "stream": stream}) as answer:
            assert answer.status == 200
            return await answer.text()


@asynccontextmanager
async def team(folder: Path, **script: Any) -> AsyncIterator[Team]:
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeVllm(tokens=ANSWER, **script))
        config = config_of(f"vllm@{fake.url}", store={"url": f"sqlite://{folder}/state.db"})
        one = await stack.enter_async_context(replica(folder, config, "--workers", "2"))
        # A connection for each request.
        connector = aiohttp.TCPConnector(force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        workers = children(one.pid)
        try:
            yield Team(one, fake, session)
        finally:
            for worker in workers:
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)


async def until(condition: Any, within_s: float = SOON_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_kept_connections_are_shared_evenly_whoever_opens_them(tmp_path: Path) -> None:
    async with team(tmp_path) as here, AsyncExitStack() as held:
        first, second = here.workers
        before = [holdings(worker).descriptors for worker in (first, second)]
        port = int(here.one.url.rpartition(":")[2])
        for number in range(40):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            held.callback(writer.close)
            writer.write(b"GET /health/liveness HTTP/1.1\r\nhost: localhost\r\n\r\n")
            # Now and then all at once, now and then one by one.
            await asyncio.sleep(0.01 if number % 8 == 0 else 0)
        await asyncio.sleep(0.5)
        took = [holdings(worker).descriptors - was for worker, was in zip((first, second), before, strict=True)]
    assert sum(took) == 40
    assert abs(took[0] - took[1]) <= 6


@pytest.mark.slow
async def test_a_worker_that_dies_is_replaced_and_the_others_answer_meanwhile(tmp_path: Path) -> None:
    async with team(tmp_path) as here:
        doomed, other = here.workers
        os.kill(doomed, signal.SIGKILL)
        for _ in range(10):
            assert "la la" in await here.chat()
        await until(lambda: len(here.workers) == 2 and doomed not in here.workers)
        await here.one.logged("another one is started")
        assert other in here.workers
        os.kill(other, signal.SIGKILL)
        await until(lambda: other not in here.workers)
        async with asyncio.timeout(SOON_S):
            assert "la la" in await here.chat()


@pytest.mark.slow
async def test_a_worker_that_hangs_keeps_no_connection_from_the_others(tmp_path: Path) -> None:
    async with team(tmp_path) as here:
        stopped, _ = here.workers
        os.kill(stopped, signal.SIGSTOP)
        try:
            async with asyncio.timeout(SOON_S):
                for _ in range(20):
                    assert "la la" in await here.chat()
        finally:
            os.kill(stopped, signal.SIGCONT)


@pytest.mark.slow
async def test_workers_whose_supervisor_is_killed_finish_their_answers_and_go(tmp_path: Path) -> None:
    async with team(tmp_path, delay_s=0.05) as here:
        workers = here.workers
        answering = asyncio.ensure_future(here.chat(stream=True))
        await until(lambda: here.fake.requests)
        here.one.kill()
        assert (await answering).endswith("data: [DONE]\n\n")
        await until(lambda: not any(map(lives, workers)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
async def test_the_end_of_all_is_clean_and_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    async with team(tmp_path, delay_s=0.03) as here:
        workers = here.workers
        answering = asyncio.ensure_future(here.chat(stream=True))
        await until(lambda: here.fake.requests)
        here.one.signal(number)
        assert (await answering).endswith("data: [DONE]\n\n")
        async with asyncio.timeout(SOON_S):
            assert await here.one.ended() == 0
        assert not any(map(lives, workers))
        assert "Traceback" not in here.one.log


async def test_state_kept_by_one_worker_is_found_by_every_other(tmp_path: Path) -> None:
    async with team(tmp_path) as here:
        body = {"model": "gpt-oss", "input": "Hi"}
        async with here.session.post(f"{here.one.url}/v1/responses", json=body) as answer:
            response_id = (await answer.json())["id"]
        # The one with fewer connections takes the next: with these held, both are asked.
        for _ in range(8):
            async with here.session.get(f"{here.one.url}/v1/responses/{response_id}") as answer:
                assert (answer.status, (await answer.json())["status"]) == (200, "completed")


@pytest.mark.slow
async def test_state_in_memory_cannot_be_shared(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of("replay/demo")))
    one = Replica(tmp_path, config_of("replay/demo"), ("--workers", "2"))
    with pytest.raises(RuntimeError, match=r"store\.url: 2 workers cannot share state in memory"):
        await one.start()
    assert await one.ended() == 1
