"""Store faults during background responses: stalls, restarts, read-only mode, no memory.

Nothing acknowledged is lost, nothing is duplicated, and running responses end after the store has recovered.
"""

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
    """Run two gateways on a Redis that syncs every write to disk.

    `passes` decides which units are forwarded between it and the first gateway, by default all of them.
    """
    server = Server(folder, ("appendonly yes", "appendfsync always")).start()
    scripted_model = Model(**model)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        stack.callback(server.end)
        fake = await stack.enter_async_context(FakeVllm(script=scripted_model.script))
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
        yield Pair(server, Client(first.url, session), Client(second.url, session), fake, scripted_model)


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
    """Get a resource, retrying while the store is unavailable."""
    async with asyncio.timeout(10):
        while True:
            status, answer = await client.asks("GET", path)
            if status == 200:
                return dict(answer)
            assert status == 503, answer
            await asyncio.sleep(0.05)


Fault = Callable[[Server], Awaitable[None]]
FAULTS: dict[str, Fault] = {"stalled": stalled, "restarted": restarted, "read-only": read_only, "out of memory": full}


async def read_all_events(client: Client, received: Told, response_id: str) -> None:
    """Read the events of a response to the last one, reconnecting as needed."""
    async with asyncio.timeout(30):
        while not received.done:
            try:
                await client.resumes(received, response_id)
            except (aiohttp.ClientError, AssertionError):
                await asyncio.sleep(0.1)
            while received.events and "error" in received.events[-1]:
                received.raw.pop()
                received.events.pop()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("at", [0.3, pytest.param(1.2, marks=pytest.mark.slow)], ids=["early", "late"])
async def test_running_response_completes_after_a_store_fault(tmp_path: Path, fault: Fault, at: float) -> None:
    async with pair(tmp_path, delay_s=0.03) as harness:
        conversation = (await harness.a.post("/v1/conversations"))["id"]
        body: Json = {"model": "gpt-oss", "input": "Bear it.", "background": True, "conversation": conversation}
        created = await harness.a.post("/v1/responses", body)
        received = Told()
        listening = asyncio.create_task(read_all_events(harness.b, received, created["id"]))
        await asyncio.sleep(at)
        await fault(harness.server)
        await listening
        response = await got(harness.b, f"/v1/responses/{created['id']}")
        assert fold(received.events).response == response
        assert response["status"] == "completed"
        assert response["output"][-1]["content"][0]["text"] == harness.model.text
        items = (await got(harness.b, f"/v1/conversations/{conversation}/items?order=asc"))["data"]
        assert [item["type"] for item in items] == ["message", "reasoning", "message"]
        first, *more = prompts_about(harness.fake, "Bear it.")
        for prompt in more:
            assert prompt[: len(first)] == first
            assert len(prompt) >= len(first)


@pytest.mark.slow
async def test_idempotency_key_creates_one_response_despite_a_stalled_store(tmp_path: Path) -> None:
    """A stalled store executes old commands later.

    A retry with the same key must not duplicate them.
    """
    async with pair(tmp_path) as harness:
        body: Json = {"model": "gpt-oss", "input": "Only once.", "background": True}
        await harness.a.post("/v1/responses", {**body, "input": "Warm."})
        stall = asyncio.create_task(stalled(harness.server))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            while True:
                status, answer = await harness.a.asks("POST", "/v1/responses", body, idempotency_key="once")
                if status == 200:
                    break
                assert status in (409, 503), answer
                await asyncio.sleep(0.05)
        await stall
        response = await harness.b.over(answer["id"])
        assert response["status"] == "completed"
        assert len(prompts_about(harness.fake, "Only once.")) == 1


@pytest.mark.slow
async def test_lease_granted_by_a_stalled_store_does_not_block_creation(tmp_path: Path) -> None:
    async with pair(tmp_path) as harness:
        body: Json = {"model": "gpt-oss", "input": "Again.", "background": True}
        await harness.a.over((await harness.a.post("/v1/responses", body))["id"])
        harness.server.signal(signal.SIGSTOP)
        asking = asyncio.create_task(harness.a.asks("POST", "/v1/responses", body))
        # Longer than the limit of an operation: the first try has failed, but is still queued at the server.
        await asyncio.sleep(0.4)
        harness.server.signal(signal.SIGCONT)
        status, answer = await asking
        assert status == 200, answer
        assert (await harness.b.over(answer["id"]))["status"] == "completed"


@pytest.mark.slow
async def test_silent_response_survives_a_long_store_stall(tmp_path: Path) -> None:
    async with pair(tmp_path, waits=True) as harness:
        body: Json = {"model": "gpt-oss", "input": "Wait.", "background": True}
        created = await harness.a.post("/v1/responses", body)
        async with asyncio.timeout(5):
            while not prompts_about(harness.fake, "Wait."):
                await asyncio.sleep(0.01)
        harness.server.signal(signal.SIGSTOP)
        await asyncio.sleep(3 * LEASE_S)
        harness.server.signal(signal.SIGCONT)
        await asyncio.sleep(LEASE_S)
        harness.model.waits = False
        harness.fake.break_connections()
        response = await harness.b.over(created["id"])
        assert response["status"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize("done", [False, True], ids=["before the new owner is done", "after the new owner is done"])
async def test_reconnected_owner_writes_nothing_after_its_lease_expired(tmp_path: Path, done: bool) -> None:
    disconnected = False
    async with pair(tmp_path, passes=lambda _: not disconnected, delay_s=0.1) as harness:
        conversation = (await harness.a.post("/v1/conversations"))["id"]
        body: Json = {"model": "gpt-oss", "input": "Part.", "background": True, "conversation": conversation}
        created = await harness.a.post("/v1/responses", body)
        await generating(harness.fake, "Part.", 1)
        await asyncio.sleep(0.3)
        disconnected = True
        # The first gateway keeps writing, without effect, until the other one owns the response.
        await generating(harness.fake, "Part.", 2)
        response = await harness.b.over(created["id"]) if done else None
        disconnected = False
        response = response or await harness.b.over(created["id"])
        assert response["status"] == "completed"
        assert response["output"][-1]["content"][0]["text"] == harness.model.text
        received = Told()
        await read_all_events(harness.a, received, created["id"])
        assert fold(received.events).response == response
        await asyncio.sleep(2 * LEASE_S)
        assert (await harness.b.resumes(Told(), created["id"])).raw == received.raw
        assert await got(harness.a, f"/v1/responses/{created['id']}") == response
        items = (await got(harness.a, f"/v1/conversations/{conversation}/items?order=asc"))["data"]
        assert [item["type"] for item in items] == ["message", "reasoning", "message"]
        first, second = prompts_about(harness.fake, "Part.")
        assert second[: len(first)] == first
        # Both gateways can use the conversation.
        harness.model.delay_s = 0
        for client in (harness.a, harness.b):
            again = await client.post("/v1/responses", {**body, "input": "Go on."})
            assert (await client.over(again["id"]))["status"] == "completed"


async def generating(fake: FakeVllm, question: str, times: int) -> None:
    """Wait until the model got this many prompts with the question."""
    async with asyncio.timeout(10):
        while len(prompts_about(fake, question)) < times:
            await asyncio.sleep(0.01)
