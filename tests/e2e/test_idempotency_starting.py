"""Idempotency keys of requests that are still starting: held by a live owner, else freed."""

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
    """Hold every response in a hook before it is stored, until the returned file exists."""
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
    """Two gateways on one Redis, or one gateway on SQLite that serves all requests."""

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


async def until_waiting(count: int) -> None:
    """Return when `count` requests wait in the hook."""
    async with asyncio.timeout(10):
        while len(CALLS) < count:
            await asyncio.sleep(0.005)


STORES = pytest.mark.parametrize("kind", ["redis", pytest.param("sqlite", marks=pytest.mark.slow)])


@STORES
@pytest.mark.parametrize("held_s", [1.5 * LEASE_S, pytest.param(6.0, marks=pytest.mark.slow)])
async def test_a_key_stays_bound_while_its_request_starts(kind: str, held_s: float, server: Server, gate: Path) -> None:
    async with gateways(kind, server, gate) as pair:
        conversation = await pair.first.conversation()
        requests: list[Json] = [
            {"stream": False},
            {"stream": True},
            {"background": True},
            {"stream": False, "conversation": conversation},
        ]

        async def post(line: Line, number: int, fields: Json) -> Answer:
            return await line.post(headers={"idempotency-key": f"key {number}"}, **fields)

        posts = [post(pair.first, number, fields) for number, fields in enumerate(requests)]
        first = [asyncio.create_task(request) for request in posts]
        await until_waiting(len(requests))
        repeats = [post(pair.second, number, fields) for number, fields in enumerate(requests)]
        second = [asyncio.create_task(request) for request in repeats]
        await asyncio.sleep(held_s)
        # The lease of the conversation lasts while its request starts, too.
        conflicting = await pair.second.post(conversation=conversation, store=False)
        refusal(conflicting, 409, "conversation", code="state_conflict")
        assert pair.generations() == 0
        gate.touch()
        responses, repeated = await asyncio.gather(*first), await asyncio.gather(*second)
        assert {response.status for response in (*responses, *repeated)} == {200}
        assert [response_of(response)["id"] for response in responses] == [
            response_of(response)["id"] for response in repeated
        ]
        assert pair.generations() == len(requests)


@STORES
async def test_the_key_of_a_dead_process_is_freed_after_the_lease_and_fenced(
    kind: str, server: Server, gate: Path
) -> None:
    gate.touch()
    async with gateways(kind, server, gate) as pair:
        body = json.dumps({"model": "gpt-oss", "input": "Hi"}).encode()
        digest = blake2b(body, digest_size=16, person=b"unisono-body").hexdigest()
        # A process that dies between the claim and the response leaves this in the store.
        dead_id = "resp_" + "d" * 32
        assert await pair.store.claim(LOCAL_TENANT, "key", digest, dead_id) == dead_id
        lease = await pair.store.acquire(LOCAL_TENANT, dead_id, "dead", LEASE_S)
        assert lease is not None
        responses = await asyncio.gather(
            *(line.gateway.post("/v1/responses", body, idempotency_key="key") for line in (pair.first, pair.second))
        )
        assert [response.status for response in responses] == [200, 200]
        assert responses[0].body["id"] == responses[1].body["id"] != dead_id
        assert pair.generations() == 1
        late_response = StoredResponse(dead_id, Status.QUEUED, "gpt-oss", 1.0)
        with pytest.raises(StoreConflict):
            await pair.store.create(LOCAL_TENANT, late_response, lease=lease)


async def test_a_waiting_client_that_disconnects_does_not_affect_the_key(server: Server, gate: Path) -> None:
    async with gateways("sqlite", server, gate) as pair:
        key = {"idempotency-key": "key"}
        first = asyncio.create_task(pair.first.post(headers=key))
        await until_waiting(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pair.second.post(headers=key), LEASE_S / 2)
        gate.touch()
        response = await first
        assert response_of(response) == response_of(await pair.second.post(headers=key))
        assert pair.generations() == 1


@pytest.mark.slow
async def test_a_key_survives_a_store_stall_shorter_than_the_lease(server: Server, gate: Path) -> None:
    async with gateways("redis", server, gate) as pair:
        key = {"idempotency-key": "key"}
        first = asyncio.create_task(pair.first.post(headers=key))
        await until_waiting(1)
        second = asyncio.create_task(pair.second.post(headers=key))
        with redis.Redis(port=server.port) as client:
            for _ in range(4):
                client.execute_command("CLIENT", "PAUSE", int(1000 * LEASE_S / 2), "ALL")
                await asyncio.sleep(1.5 * LEASE_S)
        gate.touch()
        assert response_of(await first)["id"] == response_of(await second)["id"]
        assert pair.generations() == 1


@pytest.mark.slow
@pytest.mark.parametrize("stop_signal", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_loses_its_lease_creates_no_response(
    stop_signal: signal.Signals, server: Server, gate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2]))))
    model, url = Model(words=3), f"redis://127.0.0.1:{server.port}/{next(DATABASES)}"
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeVllm(script=model.script))
        entry: Json = {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/tiny", "api_base": fake.url}}
        replicas = [Replica(tmp_path / name, config(url, gate, entry, lease_s=1.0)) for name in "ab"]
        for replica_ in replicas:
            stack.push_async_callback(replica_.end)
        await asyncio.gather(*(replica_.start() for replica_ in replicas))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        a, b = (Client(replica_.url, session) for replica_ in replicas)

        async def post(client: Client) -> Any:
            body = {"model": "gpt-oss", "input": "Starting."}
            return await client.post("/v1/responses", body, idempotency_key="key")

        first = asyncio.create_task(post(a))
        async with asyncio.timeout(10):
            while not gate.with_suffix(".reached").exists():
                await asyncio.sleep(0.01)
        replicas[0].signal(stop_signal)
        second = asyncio.create_task(post(b))
        # Twice the duration of the lease.
        await asyncio.sleep(2.0)
        gate.touch()
        response = await asyncio.wait_for(second, 10)
        if stop_signal is signal.SIGSTOP:
            replicas[0].signal(signal.SIGCONT)
            assert (await asyncio.wait_for(first, 10))["id"] == response["id"]
        else:
            await asyncio.gather(first, return_exceptions=True)
        assert len(prompts_about(fake, "Starting.")) == 1
