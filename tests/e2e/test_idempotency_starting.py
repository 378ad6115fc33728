"""Idempotency keys while their requests start: bound as long as the owner lives, and free when it dies."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis

from tests.contract.servers import Server
from tests.e2e.continuing import Model, prompts_about
from tests.e2e.gateway import Answer, Gateway, gateway
from tests.e2e.hooked import CALLS, install
from tests.e2e.replicas import Client, Json, Replica
from tests.e2e.responses import ANSWER, Line, refusal
from tests.e2e.test_responses_idempotency import response_of
from tests.e2e.wires import WIRES, asked, deployment
from tests.fakes import FakeVllm
from unisono.core.access import LOCAL_TENANT
from unisono.core.state_store import Status, Store, StoredResponse
from unisono.errors import StoreConflict

LEASE_S = 0.8
DATABASES = itertools.count()


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; every response waits in a hook for it to exist before it is stored."""
    install(tmp_path, monkeypatch, waiting="tests.e2e.hooked:Waiting")
    return tmp_path / "open"


def config(url: str, gate: Path, *deployments: Mapping[str, Any], lease_s: float = LEASE_S) -> Json:
    return {
        "model_list": [*deployments],
        "store": {"url": url, "deadline_s": 2.0, "lease_s": lease_s},
        "unisono": {"hooks": [{"waiting": {"file": str(gate), "timeout_s": 30}}], "shutdown_grace_s": 5},
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"), ("appendonly yes", "maxmemory-policy noeviction"))
    try:
        yield server.start()
    finally:
        server.end()


@dataclass
class Gateways:
    """Two gateways on one Redis, or one gateway on SQLite that gets all requests."""

    first: Line
    second: Line

    @property
    def store(self) -> Store:
        return store_of(self.second.gateway)

    def generations(self) -> int:
        return len(asked(self.first.fake))


def store_of(running: Gateway) -> Store:
    assert running.app is not None
    store: Store = running.app.state.gateway.store
    return store


@asynccontextmanager
async def gateways(kind: str, server: Server, gate: Path) -> AsyncIterator[Gateways]:
    wire = WIRES["vllm"]
    url = f"redis://127.0.0.1:{server.port}/{next(DATABASES)}" if kind == "redis" else f"sqlite:///{gate.parent}/db"
    async with AsyncExitStack() as stack:
        fake = wire.fake()
        await stack.enter_async_context(fake)
        settings = config(url, gate, deployment("gpt-oss", wire, fake))
        count = 2 if kind == "redis" else 1
        lines = [Line(wire, fake, await stack.enter_async_context(gateway(settings))) for _ in range(count)]
        lines[0].say(ANSWER)
        yield Gateways(lines[0], lines[-1])


async def starting(count: int) -> None:
    """Return when that many requests wait in the hook."""
    async with asyncio.timeout(10):
        while len(CALLS) < count:
            await asyncio.sleep(0.005)


STORES = pytest.mark.parametrize("kind", ["redis", pytest.param("sqlite", marks=pytest.mark.slow)])


@STORES
@pytest.mark.parametrize("held_s", [1.5 * LEASE_S, pytest.param(6.0, marks=pytest.mark.slow)])
async def test_a_key_is_bound_to_its_request_however_long_that_starts(
    kind: str, held_s: float, server: Server, gate: Path
) -> None:
    async with gateways(kind, server, gate) as here:
        conversation = await here.first.conversation()
        requests: list[Json] = [
            {"stream": False},
            {"stream": True},
            {"background": True},
            {"stream": False, "conversation": conversation},
        ]

        async def post(line: Line, number: int, fields: Json) -> Answer:
            return await line.post(headers={"idempotency-key": f"key {number}"}, **fields)

        posts = [post(here.first, number, fields) for number, fields in enumerate(requests)]
        first = [asyncio.create_task(each) for each in posts]
        await starting(len(requests))
        repeats = [post(here.second, number, fields) for number, fields in enumerate(requests)]
        second = [asyncio.create_task(each) for each in repeats]
        await asyncio.sleep(held_s)
        # The lease of the conversation lasts as long as its request starts, too.
        other = await here.second.post(conversation=conversation, store=False)
        refusal(other, 409, "conversation", code="state_conflict")
        assert here.generations() == 0
        gate.touch()
        answers, again = await asyncio.gather(*first), await asyncio.gather(*second)
        assert {answer.status for answer in (*answers, *again)} == {200}
        assert [response_of(one)["id"] for one in answers] == [response_of(one)["id"] for one in again]
        assert here.generations() == len(requests)


@STORES
async def test_the_key_of_a_dead_process_is_free_after_the_lease_and_fenced(
    kind: str, server: Server, gate: Path
) -> None:
    gate.touch()
    async with gateways(kind, server, gate) as here:
        body = json.dumps({"model": "gpt-oss", "input": "Hi"}).encode()
        digest = blake2b(body, digest_size=16, person=b"unisono-body").hexdigest()
        # A process leaves this in the store when it dies between the claim and the response.
        dead = "resp_" + "d" * 32
        assert await here.store.claim(LOCAL_TENANT, "key", digest, dead) == dead
        lease = await here.store.acquire(LOCAL_TENANT, dead, "dead", LEASE_S)
        assert lease is not None
        answers = await asyncio.gather(
            *(line.gateway.post("/v1/responses", body, idempotency_key="key") for line in (here.first, here.second))
        )
        assert [answer.status for answer in answers] == [200, 200]
        assert answers[0].body["id"] == answers[1].body["id"] != dead
        assert here.generations() == 1
        late = StoredResponse(dead, Status.QUEUED, "gpt-oss", 1.0)
        with pytest.raises(StoreConflict):
            await here.store.create(LOCAL_TENANT, late, lease=lease)


async def test_a_client_that_leaves_while_it_waits_leaves_the_key_alone(server: Server, gate: Path) -> None:
    async with gateways("sqlite", server, gate) as here:
        key = {"idempotency-key": "key"}
        first = asyncio.create_task(here.first.post(headers=key))
        await starting(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(here.second.post(headers=key), LEASE_S / 2)
        gate.touch()
        answer = await first
        assert response_of(answer) == response_of(await here.second.post(headers=key))
        assert here.generations() == 1


@pytest.mark.slow
async def test_a_key_survives_a_store_that_stops_for_less_than_the_lease(server: Server, gate: Path) -> None:
    async with gateways("redis", server, gate) as here:
        key = {"idempotency-key": "key"}
        first = asyncio.create_task(here.first.post(headers=key))
        await starting(1)
        second = asyncio.create_task(here.second.post(headers=key))
        with redis.Redis(port=server.port) as client:
            for _ in range(4):
                client.execute_command("CLIENT", "PAUSE", int(1000 * LEASE_S / 2), "ALL")
                await asyncio.sleep(1.5 * LEASE_S)
        gate.touch()
        assert response_of(await first)["id"] == response_of(await second)["id"]
        assert here.generations() == 1


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_loses_its_lease_while_it_starts_makes_no_response(
    ending: signal.Signals, server: Server, gate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2]))))
    model, url = Model(words=3), f"redis://127.0.0.1:{server.port}/{next(DATABASES)}"
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeVllm(script=model.script))
        entry: Json = {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/tiny", "api_base": fake.url}}
        pair = [Replica(tmp_path / name, config(url, gate, entry, lease_s=1.0)) for name in "ab"]
        for one in pair:
            stack.push_async_callback(one.end)
        await asyncio.gather(*(one.start() for one in pair))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        a, b = (Client(one.url, session) for one in pair)

        async def post(client: Client) -> Any:
            body = {"model": "gpt-oss", "input": "Starting."}
            return await client.post("/v1/responses", body, idempotency_key="key")

        first = asyncio.create_task(post(a))
        async with asyncio.timeout(10):
            while not gate.with_suffix(".reached").exists():
                await asyncio.sleep(0.01)
        pair[0].signal(ending)
        second = asyncio.create_task(post(b))
        # Twice as long as the lease lasts.
        await asyncio.sleep(2.0)
        gate.touch()
        response = await asyncio.wait_for(second, 10)
        if ending is signal.SIGSTOP:
            pair[0].signal(signal.SIGCONT)
            assert (await asyncio.wait_for(first, 10))["id"] == response["id"]
        else:
            await asyncio.gather(first, return_exceptions=True)
        assert len(prompts_about(fake, "Starting.")) == 1
