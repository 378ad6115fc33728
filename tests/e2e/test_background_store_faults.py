"""A store that stalls, dies, fills up or takes no writes while responses run in the background: nothing that was
acknowledged is lost, nothing is there twice, and what runs comes to its end once the store is back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.api.responses.folding import fold
from tests.contract.servers import Server
from tests.e2e.continuing import Model, prompts_about
from tests.e2e.gateway import config_of, gateway
from tests.e2e.replicas import LEASE_S, Client, Json, Relay, Told, anything, one_command
from tests.fakes import FakeVllm

FAULT_S = 2.0


@dataclass
class Pair:
    server: Server
    a: Client
    b: Client
    fake: FakeVllm
    model: Model


@asynccontextmanager
async def pair(
    folder: Path, *, passes: Callable[[bytes], bool] | None = None, **model: int | float | bool
) -> AsyncIterator[Pair]:
    """Two gateways on a Redis that writes down what it acknowledges. `passes` says what goes between it and the first,
    by default everything."""
    server = Server(folder, ("appendonly yes", "appendfsync always")).start()
    said = Model(**model)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        stack.callback(server.end)
        fake = await stack.enter_async_context(FakeVllm(script=said.script))
        urls = [server.url, server.url]
        if passes is not None:
            relay = Relay(server.port, cut_up=one_command, up=passes, cut_down=anything, down=passes)
            urls[0] = f"redis://127.0.0.1:{(await stack.enter_async_context(relay)).port}/0"
        gateways = []
        for url in urls:
            store = {"url": url, "lease_s": LEASE_S}
            config = config_of(f"vllm@{fake.url}", store=store, unisono={"current_date": "2026-11-20"})
            gateways.append(await stack.enter_async_context(gateway(config)))
        first, second = gateways
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Pair(server, Client(first.url, session), Client(second.url, session), fake, said)


async def stalled(server: Server) -> None:
    server.signal(signal.SIGSTOP)
    await asyncio.sleep(FAULT_S)
    server.signal(signal.SIGCONT)


async def restarted(server: Server) -> None:
    server.end()
    await asyncio.sleep(FAULT_S / 2)
    await asyncio.to_thread(server.start)


async def read_only(server: Server) -> None:
    with server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        await asyncio.sleep(FAULT_S)
        client.execute_command("REPLICAOF", "NO", "ONE")


async def full(server: Server) -> None:
    with server.client() as client:
        client.config_set("maxmemory", 1)
        await asyncio.sleep(FAULT_S)
        client.config_set("maxmemory", 0)


async def got(client: Client, path: str) -> Json:
    """What is there, from a store that may have to be found again."""
    async with asyncio.timeout(10):
        while True:
            status, answer = await client.asks("GET", path)
            if status == 200:
                return dict(answer)
            assert status == 503, answer
            await asyncio.sleep(0.05)


Fault = Callable[[Server], Awaitable[None]]
FAULTS: dict[str, Fault] = {"stalled": stalled, "restarted": restarted, "read-only": read_only, "full": full}


async def hears(client: Client, told: Told, response_id: str) -> None:
    """Read a response's events to the last, however often that takes."""
    async with asyncio.timeout(30):
        while not told.done:
            try:
                await client.resumes(told, response_id)
            except (aiohttp.ClientError, AssertionError):
                await asyncio.sleep(0.1)
            while told.events and "error" in told.events[-1]:
                told.raw.pop()
                told.events.pop()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("at", [0.3, pytest.param(1.2, marks=pytest.mark.slow)], ids=["early", "late"])
async def test_what_runs_comes_to_its_end(tmp_path: Path, fault: Fault, at: float) -> None:
    async with pair(tmp_path, delay_s=0.03) as here:
        talk = (await here.a.post("/v1/conversations"))["id"]
        body: Json = {"model": "gpt-oss", "input": "Bear it.", "background": True, "conversation": talk}
        made = await here.a.post("/v1/responses", body)
        told = Told()
        listening = asyncio.create_task(hears(here.b, told, made["id"]))
        await asyncio.sleep(at)
        await fault(here.server)
        await listening
        kept = await got(here.b, f"/v1/responses/{made['id']}")
        assert fold(told.events).response == kept
        assert kept["status"] == "completed"
        assert kept["output"][-1]["content"][0]["text"] == here.model.text
        items = (await got(here.b, f"/v1/conversations/{talk}/items?order=asc"))["data"]
        assert [item["type"] for item in items] == ["message", "reasoning", "message"]
        first, *more = prompts_about(here.fake, "Bear it.")
        for prompt in more:
            assert prompt[: len(first)] == first
            assert len(prompt) >= len(first)


@pytest.mark.slow
async def test_a_response_whose_creation_failed_is_made_once_by_its_key(tmp_path: Path) -> None:
    """A store that wakes up does what it was asked long ago: whoever was refused then, and asks again, gets one."""
    async with pair(tmp_path) as here:
        body: Json = {"model": "gpt-oss", "input": "Only once.", "background": True}
        await here.a.post("/v1/responses", {**body, "input": "Warm."})
        stall = asyncio.create_task(stalled(here.server))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            while True:
                status, answer = await here.a.asks("POST", "/v1/responses", body, idempotency_key="once")
                if status == 200:
                    break
                assert status in (409, 503), answer
                await asyncio.sleep(0.05)
        await stall
        kept = await here.b.over(answer["id"])
        assert kept["status"] == "completed"
        assert len(prompts_about(here.fake, "Only once.")) == 1


@pytest.mark.slow
async def test_a_lease_that_was_granted_without_a_word_is_no_obstacle(tmp_path: Path) -> None:
    async with pair(tmp_path) as here:
        body: Json = {"model": "gpt-oss", "input": "Again.", "background": True}
        await here.a.over((await here.a.post("/v1/responses", body))["id"])
        here.server.signal(signal.SIGSTOP)
        asking = asyncio.create_task(here.a.asks("POST", "/v1/responses", body))
        # Longer than an operation may take: the first try is given up by then, and still lies before the server.
        await asyncio.sleep(0.4)
        here.server.signal(signal.SIGCONT)
        status, answer = await asking
        assert status == 200, answer
        assert (await here.b.over(answer["id"]))["status"] == "completed"


@pytest.mark.slow
async def test_a_silent_response_outlives_a_store_that_is_away_for_long(tmp_path: Path) -> None:
    async with pair(tmp_path, waits=True) as here:
        body: Json = {"model": "gpt-oss", "input": "Wait.", "background": True}
        made = await here.a.post("/v1/responses", body)
        async with asyncio.timeout(5):
            while not prompts_about(here.fake, "Wait."):
                await asyncio.sleep(0.01)
        here.server.signal(signal.SIGSTOP)
        await asyncio.sleep(3 * LEASE_S)
        here.server.signal(signal.SIGCONT)
        await asyncio.sleep(LEASE_S)
        here.model.waits = False
        here.fake.break_connections()
        kept = await here.b.over(made["id"])
        assert kept["status"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize("done", [False, True], ids=["while the other is at it", "when the other is done"])
async def test_whoever_comes_back_to_the_store_after_its_lease_writes_nothing_more(tmp_path: Path, done: bool) -> None:
    away = False
    async with pair(tmp_path, passes=lambda _: not away, delay_s=0.1) as here:
        talk = (await here.a.post("/v1/conversations"))["id"]
        body: Json = {"model": "gpt-oss", "input": "Part.", "background": True, "conversation": talk}
        made = await here.a.post("/v1/responses", body)
        await generating(here.fake, "Part.", 1)
        await asyncio.sleep(0.3)
        away = True
        # The first one writes on, into nothing, until another has the response.
        await generating(here.fake, "Part.", 2)
        kept = await here.b.over(made["id"]) if done else None
        away = False
        kept = kept or await here.b.over(made["id"])
        assert kept["status"] == "completed"
        assert kept["output"][-1]["content"][0]["text"] == here.model.text
        told = Told()
        await hears(here.a, told, made["id"])
        assert fold(told.events).response == kept
        await asyncio.sleep(2 * LEASE_S)
        assert (await here.b.resumes(Told(), made["id"])).raw == told.raw
        assert await got(here.a, f"/v1/responses/{made['id']}") == kept
        items = (await got(here.a, f"/v1/conversations/{talk}/items?order=asc"))["data"]
        assert [item["type"] for item in items] == ["message", "reasoning", "message"]
        first, second = prompts_about(here.fake, "Part.")
        assert second[: len(first)] == first
        # The conversation is free, for either.
        here.model.delay_s = 0
        for client in (here.a, here.b):
            again = await client.post("/v1/responses", {**body, "input": "Go on."})
            assert (await client.over(again["id"]))["status"] == "completed"


async def generating(fake: FakeVllm, question: str, times: int) -> None:
    """Return when a model was asked so many times."""
    async with asyncio.timeout(10):
        while len(prompts_about(fake, question)) < times:
            await asyncio.sleep(0.01)
