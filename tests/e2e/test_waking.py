"""Backends that sleep: one wake for all waiting requests of a running gateway."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bench.processes import free_port
from tests.e2e.gateway import Gateway, config_of, gateway
from tests.e2e.test_metrics import OUTPUT
from tests.fakes import FakeVllm, Refusal
from unisono.config import parse
from unisono.config.stored_entry import to_entry
from unisono.errors import ConfigError

REQUESTS = 100


class Sleeper:
    """Backend that starts when it is woken, after a moment."""

    def __init__(self) -> None:
        self.port = free_port()
        self.wakes = 0
        self.fake = FakeVllm(tokens=OUTPUT)
        self.fake.at_port = self.port
        self.opened = AsyncExitStack()
        self.is_broken = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def wake(self, _: web.Request) -> web.Response:
        self.wakes += 1
        if self.is_broken:
            return web.Response(status=500)
        await asyncio.sleep(0.3)
        await self.opened.enter_async_context(self.fake)
        return web.Response()

    async def sleep(self) -> None:
        await self.opened.aclose()


@asynccontextmanager
async def sleeping() -> AsyncIterator[tuple[Sleeper, str]]:
    """Run the server that wakes a backend; its URL is the second value."""
    sleeper, app = Sleeper(), web.Application()
    app.router.add_post("/wake", sleeper.wake)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield sleeper, "http://{}:{}/wake".format(*runner.addresses[0][:2])
    finally:
        await sleeper.sleep()
        await runner.cleanup()


def config_with(at: str, **wake: Any) -> dict[str, Any]:
    config = config_of(f"vllm@{at}", unisono={"max_queue": 2 * REQUESTS})
    config["model_list"][0]["unisono"] = {"wake": wake}
    return config


async def statuses(running: Gateway, count: int) -> set[int]:
    return {answer.status for answer in await asyncio.gather(*(running.chat() for _ in range(count)))}


async def test_waiting_requests_share_one_wake() -> None:
    async with sleeping() as (sleeper, url), gateway(config_with(sleeper.url, url=url, timeout_s=60)) as running:
        # Probes at the start wake nothing.
        assert (await running.get("/health/readiness")).status == 503
        assert sleeper.wakes == 0
        assert await statuses(running, REQUESTS) == {200}
        assert sleeper.wakes == 1
        # It falls asleep again, after it has worked.
        await sleeper.sleep()
        assert await statuses(running, 10) == {200}
        assert sleeper.wakes == 2


async def test_requests_wait_while_the_woken_backend_loads_its_model() -> None:
    async with sleeping() as (sleeper, url):
        # Without retries, an error of the backend ends a request.
        config = {**config_with(sleeper.url, url=url, timeout_s=60), "router_settings": {"num_retries": 0}}
        respond = sleeper.fake.respond
        sleeper.fake.respond = lambda _: Refusal(503, b'{"error": {"message": "Loading model"}}').steps()
        async with gateway(config) as running, asyncio.timeout(30):
            early = asyncio.create_task(statuses(running, 5))
            while not sleeper.fake.probes:
                await asyncio.sleep(0.01)
            late = asyncio.create_task(statuses(running, 5))
            await asyncio.sleep(0.2)
            sleeper.fake.respond = respond
            assert (await early, await late) == ({200}, {200})
        assert sleeper.wakes == 1


async def test_a_wake_that_fails_ends_the_requests_with_an_error() -> None:
    async with sleeping() as (sleeper, url), gateway(config_with(sleeper.url, url=url, timeout_s=60)) as running:
        sleeper.is_broken = True
        assert await statuses(running, 5) == {503}
        assert await statuses(running, 5) == {503}
        # The next wake is due after a pause.
        assert sleeper.wakes == 1


async def test_a_woken_backend_that_rejects_the_probe_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with sleeping() as (sleeper, url), gateway(config_with(sleeper.url, url=url, timeout_s=60)) as running:
        sleeper.fake.respond = lambda _: Refusal(401, b'{"error": {"message": "invalid key"}}').steps()
        assert 200 not in await statuses(running, 5)
        assert sleeper.wakes == 1
    assert [record.__dict__["backend"] for record in caplog.records if record.message == "backend not woken"]


async def test_a_command_wakes_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TEST_SECRET", "secret")
    marker = tmp_path / "woken"
    program = f"import os; open({str(marker)!r}, 'w').write(str('UNISONO_TEST_SECRET' in os.environ))"
    command = [sys.executable, "-c", program]
    async with sleeping() as (sleeper, _), gateway(config_with(sleeper.url, command=command)) as running:
        request = asyncio.create_task(running.chat())
        async with asyncio.timeout(30):
            while not marker.exists():
                await asyncio.sleep(0.02)
        await sleeper.opened.enter_async_context(sleeper.fake)
        assert (await request).status == 200
        assert marker.read_text() == "False"


@pytest.mark.parametrize("wake", [{}, {"url": "http://h/wake", "command": ["x"]}, {"url": "file:///etc"}])
async def test_wrong_settings_are_named(wake: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"model_list\[0\]\.unisono\.wake"):
        parse(config_with("http://127.0.0.1:1", **wake), {})


def test_entries_that_are_added_at_run_time_run_no_command() -> None:
    [entry] = config_with("http://127.0.0.1:1", command=["x"])["model_list"]
    with pytest.raises(ConfigError, match=r"unisono\.wake: not allowed in entries that are added at run time"):
        to_entry(entry, parse({"model_list": [entry]}, {}).config, {})
