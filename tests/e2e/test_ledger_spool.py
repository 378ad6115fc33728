"""Usage during a store failure: answers succeed, and records reach the ledger once, later."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.contract.servers import Server
from tests.e2e.gateway import Gateway, config_of, gateway
from tests.e2e.keyed import MASTER, Ring, bearing, ring, with_keys
from tests.e2e.replicas import LEASE_S, Replica, replica
from tests.fakes import FakeVllm
from tests.listening import Listener, connected
from unisono.access.keys import FRESH_S
from unisono.core.quotas import KeyLimits
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.timeout(40)

ENCODING = load_encoding()
ANSWER = ENCODING.encode_marked("<|channel|>final<|message|>Hello.<|return|>")
CHAT = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
RESPOND = {"model": "gpt-oss", "input": "Hi", "store": False}
MESSAGES = {**CHAT, "max_tokens": 100}
RAW = {"model": "gpt-oss", "prompt": "Hi", "max_tokens": 100}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPOND,
    "/v1/messages": MESSAGES,
    "/v1/completions": RAW,
}
REQUESTS = [(path, {**body, "stream": stream}) for path, body in PATHS.items() for stream in (False, True)]


class Redis:
    """Faults of a Redis server; `recover` undoes them."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.address = server.url

    def read_only(self) -> None:
        with self.server.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")

    def full(self) -> None:
        with self.server.client() as client:
            client.config_set("maxmemory", 1)

    def stalled(self) -> None:
        self.server.signal(signal.SIGSTOP)

    def gone(self) -> None:
        self.server.end()

    def recover(self, running: Gateway) -> None:
        if self.server.process is None:
            self.server.start()
        self.server.signal(signal.SIGCONT)
        with self.server.client() as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
            client.config_set("maxmemory", 0)


class Sqlite:
    """Faults of a SQLite file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.address = f"sqlite://{path}"
        self.blocker: sqlite3.Connection | None = None
        self.running: Gateway | None = None

    def stalled(self) -> None:
        self.blocker = sqlite3.connect(self.path, isolation_level=None)
        self.blocker.execute("BEGIN IMMEDIATE")

    def read_only(self) -> None:
        self._connection.execute("PRAGMA query_only = ON")

    @property
    def _connection(self) -> sqlite3.Connection:
        assert self.running is not None
        assert self.running.app is not None
        connection = self.running.app.state.gateway.store._db
        assert isinstance(connection, sqlite3.Connection)
        return connection

    def recover(self, running: Gateway) -> None:
        self._connection.execute("PRAGMA query_only = OFF")
        if self.blocker is not None:
            self.blocker.close()


@asynccontextmanager
async def serving(store: Redis | Sqlite, folder: Path, fake: FakeVllm) -> AsyncIterator[tuple[Gateway, Ring]]:
    config = with_keys(config_of(f"vllm@{fake.url}", unisono={"raw_completions": True}), store.address)
    config["store"] |= {"spool_dir": str(folder / "spool")}
    async with gateway(config) as running, ring(store.address) as keys:
        if isinstance(store, Sqlite):
            store.running = running
        yield running, keys


async def complete_request(running: Gateway, key: str, path: str, body: dict[str, Any]) -> None:
    """Send a request and check that the answer is complete."""
    async with running.session.post(running.url + path, json=body, headers=bearing(key)) as response:
        text = await response.text()
    assert response.status == 200, text
    assert "Hello" in text
    assert "error" not in text.replace('"error":null', ""), text
    assert not body["stream"] or any(marker in text for marker in ("[DONE]", "message_stop", "response.completed"))


async def ledger_requests(keys: Ring, key: str) -> int:
    return sum(entry.used.requests for entry in await keys.store.ledger("0000", "9999") if entry.account.key == key)


async def until_accounted(running: Gateway, keys: Ring, key: str, count: int) -> None:
    """Wait until the ledger has `count` requests of the key and no record is waiting."""
    async with asyncio.timeout(20):
        while await ledger_requests(keys, key) < count or "usage_unaccounted" in await readiness_reasons(running):
            await asyncio.sleep(0.02)
    assert await ledger_requests(keys, key) == count
    assert await metric(running, "unisono_usage_unaccounted_records") == 0


async def readiness_reasons(running: Gateway) -> list[str]:
    return list((await running.get("/health/readiness")).body["reasons"])


async def metric(running: Gateway, name: str) -> float:
    async with running.session.get(running.url + "/metrics", headers=bearing(MASTER)) as answer:
        text = await answer.text()
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith(name + " ")))


@pytest.fixture(params=["redis", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Redis | Sqlite:
    if request.param == "sqlite":
        return Sqlite(tmp_path / "state.db")
    server: Server = request.getfixturevalue("redis_server")
    with server.client() as client:
        client.flushall()
    return Redis(server)


FAULTS = [
    *(("redis", name) for name in ("read_only", "full", "stalled", "gone")),
    ("sqlite", "read_only"),
    pytest.param("sqlite", "stalled", marks=pytest.mark.slow),
]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("store", "fault"), FAULTS, indirect=["store"])
async def test_answers_are_delivered_while_the_store_rejects_writes(
    tmp_path: Path, store: Redis | Sqlite, fault: str
) -> None:
    async with FakeVllm(tokens=ANSWER, first_delay_s=0.3) as fake, serving(store, tmp_path, fake) as (running, keys):
        record, key = await keys.issue(raw=True)
        tasks = [asyncio.create_task(complete_request(running, key, *request)) for request in REQUESTS]
        await fake.asked(len(REQUESTS))
        getattr(store, fault)()
        try:
            await asyncio.gather(*tasks)
            assert "usage_unaccounted" in await readiness_reasons(running)
            assert await metric(running, "unisono_usage_unaccounted_records") == len(REQUESTS)
        finally:
            store.recover(running)
        await until_accounted(running, keys, record.id, len(REQUESTS))
        assert all(not path.stat().st_size for path in (tmp_path / "spool").iterdir())


BUDGET_FAULTS = [
    *(("redis", fault) for fault in ("read_only", "full", "stalled")),
    ("sqlite", "read_only"),
    pytest.param("sqlite", "stalled", marks=pytest.mark.slow),
]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("store", "fault"), BUDGET_FAULTS, indirect=["store"])
async def test_only_keys_with_a_budget_are_rejected_and_before_generation(
    tmp_path: Path, store: Redis | Sqlite, fault: str
) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, serving(store, tmp_path, fake) as (running, keys):

        async def statuses(key: str) -> set[int]:
            return set(await asyncio.gather(*(rejection_status(running, key, *request) for request in REQUESTS)))

        # One request per key is answered before the fault; it counts too.
        max_requests = len(REQUESTS) + 1
        keys_without_budget = [
            await keys.issue(raw=True, limits=limits) for limits in (KeyLimits(), KeyLimits(rpm=max_requests))
        ]
        budget_keys = [(await keys.issue(raw=True, limits=KeyLimits(**{name: 10**6})))[1] for name in BUDGETS]
        record, small_key = await keys.issue(raw=True, limits=KeyLimits(tpm=150))
        await asyncio.gather(
            *(
                complete_request(running, key, *REQUESTS[0])
                for key in [small_key, *(key for _, key in keys_without_budget)]
            )
        )
        getattr(store, fault)()
        try:
            await asyncio.gather(
                *(complete_request(running, key, *request) for _, key in keys_without_budget for request in REQUESTS)
            )
            requests_before = len(fake.requests)
            assert await statuses(keys_without_budget[1][1]) == {429}
            assert await statuses(small_key) == {429}
            for key in budget_keys:
                assert await statuses(key) == {503}
            assert len(fake.requests) == requests_before
        finally:
            store.recover(running)
        for record_without_budget, _ in keys_without_budget:
            await until_accounted(running, keys, record_without_budget.id, max_requests)
        await until_accounted(running, keys, record.id, 1)


async def rejection_status(running: Gateway, key: str, path: str, body: dict[str, Any]) -> int:
    """Return the status of a rejected request."""
    async with running.session.post(running.url + path, json=body, headers=bearing(key)) as response:
        assert int(response.headers["retry-after"]) >= 1
        return response.status


BUDGETS = ("token_budget", "money_budget")


@pytest.mark.slow
async def test_a_full_store_is_reported_by_readiness(tmp_path: Path, redis_server: Server) -> None:
    store = Redis(redis_server)
    async with FakeVllm(tokens=ANSWER) as fake, serving(store, tmp_path, fake) as (running, keys):
        _, key = await keys.issue()
        for fault, reason in (("full", "store_full"), ("read_only", "store_read_only")):
            getattr(store, fault)()
            try:
                await complete_request(running, key, "/v1/chat/completions", {**CHAT, "stream": False})
                async with asyncio.timeout(5):
                    while reason not in await readiness_reasons(running):
                        await asyncio.sleep(0.02)
            finally:
                store.recover(running)
            async with asyncio.timeout(10):
                while await readiness_reasons(running):
                    await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("limits", [KeyLimits(), KeyLimits(token_budget=10**6)], ids=["unlimited", "budget"])
async def test_a_restart_replays_the_spool_of_a_killed_process(
    tmp_path: Path, store: Redis | Sqlite, limits: KeyLimits
) -> None:
    async with FakeVllm(tokens=ANSWER, first_delay_s=0.5) as fake, AsyncExitStack() as stack:
        config = with_keys(config_of(f"vllm@{fake.url}"), store.address)
        config["store"] |= {"spool_dir": str(tmp_path / "spool"), "lease_s": LEASE_S}
        keys = await stack.enter_async_context(ring(store.address))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        first = await stack.enter_async_context(replica(tmp_path / "a", config))
        record, key = await keys.issue(limits=limits)

        async def chat(replica_: Replica) -> int:
            async with session.post(replica_.url + "/v1/chat/completions", json=CHAT, headers=bearing(key)) as response:
                assert response.status == 200, await response.text()
                return int((await response.json())["usage"]["total_tokens"])

        tasks = [asyncio.create_task(chat(first)) for _ in range(3)]
        await fake.asked(3)
        if isinstance(store, Redis):
            store.full()
        else:
            store.stalled()
        reported = sum(await asyncio.gather(*tasks))
        first.kill()
        await first.ended()
        if isinstance(store, Redis):
            with store.server.client() as client:
                client.config_set("maxmemory", 0)
        elif store.blocker is not None:
            store.blocker.close()
        # Both processes find the file; one of them replays it.
        await asyncio.gather(*(stack.enter_async_context(replica(tmp_path / name, config)) for name in "bc"))
        async with asyncio.timeout(20):
            while any((tmp_path / "spool").glob("*.jsonl")):
                await asyncio.sleep(0.05)
        [used] = [entry.used for entry in await keys.store.ledger("0000", "9999") if entry.account.key == record.id]
        assert (used.requests, used.tokens) == (3, reported)


class DelayingProxy:
    """Forward data to the store after `delay_s()` seconds."""

    def __init__(self, port: int, delay_s: Callable[[], float]) -> None:
        self._port = port
        self._delay_s = delay_s
        self._listener = Listener(self._connected)

    async def __aenter__(self) -> DelayingProxy:
        await self._listener.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._listener.aclose()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.port}/0"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with connected(self._port) as (store_reader, store_writer):
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._forward(reader, store_writer, is_delayed=True))
                    tasks.create_task(self._forward(store_reader, writer, is_delayed=False))
            except* OSError:
                writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_delayed: bool) -> None:
        while data := await reader.read(1 << 16):
            if is_delayed:
                await asyncio.sleep(self._delay_s())
            writer.write(data)
        raise ConnectionResetError


STALLS_S = (0.3, 0.9)


@pytest.mark.parametrize(
    "with_key", [pytest.param(False, id="no key"), pytest.param(True, id="unlimited key", marks=pytest.mark.slow)]
)
async def test_a_stalling_store_does_not_delay_chat_without_a_budget(
    tmp_path: Path, redis_server: Server, with_key: bool
) -> None:
    with redis_server.client() as client:
        client.flushall()
    delay_s = 0.0
    async with (
        FakeVllm(tokens=ANSWER) as fake,
        DelayingProxy(redis_server.port, lambda: delay_s) as proxy,
        ring(redis_server.url) as keys,
    ):
        config = with_keys(config_of(f"vllm@{fake.url}"), proxy.url)
        config["store"] |= {"spool_dir": str(tmp_path / "spool"), "deadline_s": 2.0}
        async with gateway(config) as running:
            _, issued_key = await keys.issue()
            key = issued_key if with_key else MASTER

            async def duration_s() -> float:
                started = time.monotonic()
                await complete_request(running, key, "/v1/chat/completions", {**CHAT, "stream": False})
                return time.monotonic() - started

            await duration_s()
            base_s = statistics.median([await duration_s() for _ in range(9)])
            for delay_s in STALLS_S:
                await asyncio.sleep(FRESH_S)
                times = [await duration_s() for _ in range(9)]
                # A request that waits for the store even once takes longer by the whole delay.
                assert statistics.median(times) < base_s + delay_s / 2, delay_s
            delay_s = 0.0
