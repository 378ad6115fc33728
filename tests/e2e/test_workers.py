"""Several workers on one port: shared connections, crashes and shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
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
from unisono.server.supervisor import LEAVING_S

pytestmark = pytest.mark.timeout(180)

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>" + "la " * 40 + "<|return|>")
CHAT: dict[str, Any] = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
IDLE = 'unisono_requests_in_flight{model="gpt-oss"} 0.0'
TIMEOUT_S = 20.0


@dataclass
class Team:
    """A supervisor with two workers."""

    supervisor: Replica
    fake: FakeVllm
    session: aiohttp.ClientSession
    config: dict[str, Any]

    def reload(self, **settings: Any) -> None:
        self.supervisor.write({**self.config, "unisono": {**self.config["unisono"], **settings}})
        self.supervisor.signal(signal.SIGHUP)

    async def replace(self, worker: int) -> None:
        os.kill(worker, signal.SIGKILL)
        await until(lambda: len(self.workers) == 2 and worker not in self.workers)

    @property
    def workers(self) -> list[int]:
        return children(self.supervisor.pid)

    async def chat(self, *, stream: bool = False) -> str:
        async with self.session.post(
            f"{self.supervisor.url}/v1/chat/completions", json={**CHAT, "stream": stream}
        ) as response:
            assert response.status == 200
            return await response.text()


@asynccontextmanager
async def team(folder: Path, unisono: Mapping[str, Any] = {}, **script: Any) -> AsyncIterator[Team]:
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeVllm(tokens=ANSWER, **script))
        config = config_of(f"vllm@{fake.url}", store={"url": f"sqlite://{folder}/state.db"}, unisono=dict(unisono))
        supervisor = await stack.enter_async_context(replica(folder, config, "--workers", "2"))
        # A new connection for each request.
        connector = aiohttp.TCPConnector(force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        workers = children(supervisor.pid)
        try:
            yield Team(supervisor, fake, session, config)
        finally:
            for worker in workers:
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)


async def until(condition: Any, within_s: float = TIMEOUT_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_open_connections_are_shared_evenly_between_workers(tmp_path: Path) -> None:
    async with team(tmp_path) as workers_team, AsyncExitStack() as stack:
        first, second = workers_team.workers
        before = [holdings(worker).descriptors for worker in (first, second)]
        port = int(workers_team.supervisor.url.rpartition(":")[2])
        for number in range(40):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(b"GET /health/liveness HTTP/1.1\r\nhost: localhost\r\n\r\n")
            # Sometimes in a burst, sometimes one by one.
            await asyncio.sleep(0.01 if number % 8 == 0 else 0)
        await asyncio.sleep(0.5)
        connection_counts = [
            holdings(worker).descriptors - count_before
            for worker, count_before in zip((first, second), before, strict=True)
        ]
    assert sum(connection_counts) == 40
    assert abs(connection_counts[0] - connection_counts[1]) <= 6


@pytest.mark.slow
async def test_a_dead_worker_is_replaced_while_the_other_answers(tmp_path: Path) -> None:
    async with team(tmp_path) as workers_team:
        first, second = workers_team.workers
        os.kill(first, signal.SIGKILL)
        for _ in range(10):
            assert "la la" in await workers_team.chat()
        await until(lambda: len(workers_team.workers) == 2 and first not in workers_team.workers)
        await workers_team.supervisor.logged("another one is started")
        assert second in workers_team.workers
        os.kill(second, signal.SIGKILL)
        await until(lambda: second not in workers_team.workers)
        async with asyncio.timeout(TIMEOUT_S):
            assert "la la" in await workers_team.chat()


@pytest.mark.slow
async def test_a_worker_that_starts_after_a_rejected_reload_uses_the_old_configuration(tmp_path: Path) -> None:
    used = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{used.sockets[0].getsockname()[1]}"
    async with used, team(tmp_path) as workers_team:
        workers_team.reload(metrics_listen=address)
        await workers_team.supervisor.logged("the configuration was not reloaded: unisono.metrics_listen", 2)
        for worker in workers_team.workers:
            await workers_team.replace(worker)
        async with asyncio.timeout(TIMEOUT_S):
            assert "la la" in await workers_team.chat()
        assert workers_team.supervisor.log.count("another one is started") == 2


@pytest.mark.slow
async def test_a_worker_that_starts_after_a_reload_uses_the_new_configuration(tmp_path: Path) -> None:
    async with team(tmp_path) as workers_team:
        workers_team.reload(max_body_bytes=10)
        await workers_team.supervisor.logged("the configuration was reloaded", 2)
        for worker in workers_team.workers:
            await workers_team.replace(worker)
        url = f"{workers_team.supervisor.url}/v1/chat/completions"
        async with asyncio.timeout(TIMEOUT_S), workers_team.session.post(url, json=CHAT) as response:
            assert response.status == 413


@pytest.mark.slow
async def test_a_worker_that_starts_during_a_reload_gets_the_new_configuration(tmp_path: Path) -> None:
    async with team(tmp_path) as workers_team:
        first, second = workers_team.workers
        for worker in (first, second):
            os.kill(worker, signal.SIGSTOP)
        workers_team.reload(max_body_bytes=10, max_connections=7)
        # The supervisor logs this when it sends the configuration.
        await workers_team.supervisor.logged("takes effect after a restart")
        await workers_team.replace(second)
        os.kill(first, signal.SIGCONT)
        await workers_team.supervisor.logged("the configuration was reloaded", 2)
        await workers_team.replace(first)
        url = f"{workers_team.supervisor.url}/v1/chat/completions"
        async with asyncio.timeout(TIMEOUT_S), workers_team.session.post(url, json=CHAT) as response:
            assert response.status == 413


@pytest.mark.slow
async def test_metrics_that_a_reload_enables_leave_out_crashed_workers(tmp_path: Path) -> None:
    async with team(tmp_path, {"metrics": False}, per_chunk=1, delay_s=1.0) as workers_team:
        workers_team.reload(metrics=True)
        await workers_team.supervisor.logged("the configuration was reloaded", 2)
        running = asyncio.ensure_future(workers_team.chat(stream=True))
        await until(lambda: workers_team.fake.requests)
        for worker in workers_team.workers:
            await workers_team.replace(worker)
        with pytest.raises(aiohttp.ClientError):
            await running
        async with (
            asyncio.timeout(TIMEOUT_S),
            workers_team.session.get(f"{workers_team.supervisor.url}/metrics") as response,
        ):
            lines = (await response.text()).splitlines()
        assert [line for line in lines if line.startswith("unisono_requests_in_flight{")] in ([], [IDLE])


@pytest.mark.slow
async def test_a_reload_does_not_shorten_the_grace_period_of_running_workers(tmp_path: Path) -> None:
    tokens_s = (LEAVING_S + 5) / 40
    async with team(tmp_path, {"shutdown_grace_s": 60}, per_chunk=1, delay_s=tokens_s) as workers_team:
        workers_team.reload(shutdown_grace_s=1)
        await workers_team.supervisor.logged("unisono.shutdown_grace_s: the change takes effect after a restart")
        await workers_team.supervisor.logged("the configuration was reloaded", 2)
        task = asyncio.ensure_future(workers_team.chat(stream=True))
        await until(lambda: workers_team.fake.requests)
        workers_team.supervisor.signal(signal.SIGTERM)
        assert (await task).endswith("data: [DONE]\n\n")
        assert await workers_team.supervisor.ended() == 0


@pytest.mark.slow
async def test_a_hanging_worker_blocks_no_connections_of_the_other(tmp_path: Path) -> None:
    async with team(tmp_path) as workers_team:
        stopped, _ = workers_team.workers
        os.kill(stopped, signal.SIGSTOP)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for _ in range(20):
                    assert "la la" in await workers_team.chat()
        finally:
            os.kill(stopped, signal.SIGCONT)


@pytest.mark.slow
async def test_workers_of_a_killed_supervisor_finish_their_answers_and_exit(tmp_path: Path) -> None:
    async with team(tmp_path, delay_s=0.05) as workers_team:
        workers = workers_team.workers
        task = asyncio.ensure_future(workers_team.chat(stream=True))
        await until(lambda: workers_team.fake.requests)
        workers_team.supervisor.kill()
        assert (await task).endswith("data: [DONE]\n\n")
        await until(lambda: not any(map(lives, workers)))


@pytest.mark.slow
@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
async def test_a_shutdown_is_clean_and_leaves_no_process(stop_signal: signal.Signals, tmp_path: Path) -> None:
    async with team(tmp_path, delay_s=0.03) as workers_team:
        workers = workers_team.workers
        task = asyncio.ensure_future(workers_team.chat(stream=True))
        await until(lambda: workers_team.fake.requests)
        workers_team.supervisor.signal(stop_signal)
        assert (await task).endswith("data: [DONE]\n\n")
        async with asyncio.timeout(TIMEOUT_S):
            assert await workers_team.supervisor.ended() == 0
        assert not any(map(lives, workers))
        assert "Traceback" not in workers_team.supervisor.log


@pytest.mark.slow
async def test_state_of_one_worker_is_found_by_the_other(tmp_path: Path) -> None:
    async with team(tmp_path) as workers_team:
        body = {"model": "gpt-oss", "input": "Hi"}
        async with workers_team.session.post(f"{workers_team.supervisor.url}/v1/responses", json=body) as response:
            response_id = (await response.json())["id"]
        # The worker with fewer connections gets the next one, so both get requests.
        for _ in range(8):
            async with workers_team.session.get(
                f"{workers_team.supervisor.url}/v1/responses/{response_id}"
            ) as response:
                assert (response.status, (await response.json())["status"]) == (200, "completed")


@pytest.mark.slow
async def test_several_workers_reject_a_store_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of("replay/demo")))
    supervisor = Replica(tmp_path, config_of("replay/demo"), ("--workers", "2"))
    with pytest.raises(RuntimeError, match=r"store\.url: 2 workers cannot share state in memory"):
        await supervisor.start()
    assert await supervisor.ended() == 1
