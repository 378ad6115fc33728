"""A store that fails or stalls costs no answer: its usage record reaches the ledger later, exactly once."""

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
from unisono.access.key_lookup import FRESH_S
from unisono.core.access import KeyLimits
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
    """Faults of a Redis server; each is undone by `recover`."""

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
        self.other: sqlite3.Connection | None = None
        self.running: Gateway | None = None

    def stalled(self) -> None:
        self.other = sqlite3.connect(self.path, isolation_level=None)
        self.other.execute("BEGIN IMMEDIATE")

    def read_only(self) -> None:
        self._connection.execute("PRAGMA query_only = ON")

    @property
    def _connection(self) -> sqlite3.Connection:
        assert self.running is not None
        assert self.running.app is not None
        found = self.running.app.state.gateway.store._db
        assert isinstance(found, sqlite3.Connection)
        return found

    def recover(self, running: Gateway) -> None:
        self._connection.execute("PRAGMA query_only = OFF")
        if self.other is not None:
            self.other.close()


@asynccontextmanager
async def serving(store: Redis | Sqlite, folder: Path, fake: FakeVllm) -> AsyncIterator[tuple[Gateway, Ring]]:
    config = with_keys(config_of(f"vllm@{fake.url}", unisono={"raw_completions": True}), store.address)
    config["store"] |= {"spool_dir": str(folder / "spool")}
    async with gateway(config) as running, ring(store.address) as keys:
        if isinstance(store, Sqlite):
            store.running = running
        yield running, keys


async def answered(running: Gateway, key: str, path: str, body: dict[str, Any]) -> None:
    """One whole answer."""
    async with running.session.post(running.url + path, json=body, headers=bearing(key)) as answer:
        text = await answer.text()
    assert answer.status == 200, text
    assert "Hello" in text
    assert "error" not in text.replace('"error":null', ""), text
    assert not body["stream"] or any(end in text for end in ("[DONE]", "message_stop", "response.completed"))


async def entered(keys: Ring, key: str) -> int:
    return sum(entry.used.requests for entry in await keys.store.ledger("0000", "9999") if entry.account.key == key)


async def accounted(running: Gateway, keys: Ring, key: str, requests: int) -> None:
    """Return when the ledger has so many requests of the key, and nothing waits any more."""
    async with asyncio.timeout(20):
        while await entered(keys, key) < requests or "usage_unaccounted" in await reasons(running):
            await asyncio.sleep(0.02)
    assert await entered(keys, key) == requests
    assert await metric(running, "unisono_usage_unaccounted_records") == 0


async def reasons(running: Gateway) -> list[str]:
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
    *(("redis", fault) for fault in ("read_only", "full", "stalled", "gone")),
    ("sqlite", "read_only"),
    pytest.param("sqlite", "stalled", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("store", "fault"), FAULTS, indirect=["store"])
async def test_an_answer_is_delivered_while_the_store_takes_no_writes(
    tmp_path: Path, store: Redis | Sqlite, fault: str
) -> None:
    async with FakeVllm(tokens=ANSWER, first_delay_s=0.3) as fake, serving(store, tmp_path, fake) as (running, keys):
        record, key = await keys.issue(raw=True)
        asking = [asyncio.create_task(answered(running, key, *request)) for request in REQUESTS]
        await fake.asked(len(REQUESTS))
        getattr(store, fault)()
        try:
            await asyncio.gather(*asking)
            assert "usage_unaccounted" in await reasons(running)
            assert await metric(running, "unisono_usage_unaccounted_records") == len(REQUESTS)
        finally:
            store.recover(running)
        await accounted(running, keys, record.id, len(REQUESTS))
        assert all(not path.stat().st_size for path in (tmp_path / "spool").iterdir())


REFUSING = [
    *(("redis", fault) for fault in ("read_only", "full", "stalled")),
    ("sqlite", "read_only"),
    pytest.param("sqlite", "stalled", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("store", "fault"), REFUSING, indirect=["store"])
async def test_only_a_key_with_a_budget_is_refused_and_before_generation(
    tmp_path: Path, store: Redis | Sqlite, fault: str
) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, serving(store, tmp_path, fake) as (running, keys):

        async def statuses(key: str) -> set[int]:
            return set(await asyncio.gather(*(status(running, key, *request) for request in REQUESTS)))

        # One request of each is answered before the fault: it counts too.
        most = len(REQUESTS) + 1
        passing = [await keys.issue(raw=True, limits=one) for one in (KeyLimits(), KeyLimits(rpm=most))]
        bounded = [(await keys.issue(raw=True, limits=KeyLimits(**{name: 10**6})))[1] for name in BUDGETS]
        record, small = await keys.issue(raw=True, limits=KeyLimits(tpm=150))
        await asyncio.gather(*(answered(running, key, *REQUESTS[0]) for key in [small, *(key for _, key in passing)]))
        getattr(store, fault)()
        try:
            await asyncio.gather(*(answered(running, key, *request) for _, key in passing for request in REQUESTS))
            generated = len(fake.requests)
            assert await statuses(passing[1][1]) == {429}
            assert await statuses(small) == {429}
            for key in bounded:
                assert await statuses(key) == {503}
            assert len(fake.requests) == generated
        finally:
            store.recover(running)
        for one, _ in passing:
            await accounted(running, keys, one.id, most)
        await accounted(running, keys, record.id, 1)


async def status(running: Gateway, key: str, path: str, body: dict[str, Any]) -> int:
    """Status of a refusal."""
    async with running.session.post(running.url + path, json=body, headers=bearing(key)) as answer:
        assert int(answer.headers["retry-after"]) >= 1
        return answer.status


BUDGETS = ("token_budget", "money_budget")


@pytest.mark.slow
async def test_a_full_store_is_a_reason_of_readiness(tmp_path: Path, redis_server: Server) -> None:
    store = Redis(redis_server)
    async with FakeVllm(tokens=ANSWER) as fake, serving(store, tmp_path, fake) as (running, keys):
        _, key = await keys.issue()
        for fault, reason in (("full", "store_full"), ("read_only", "store_read_only")):
            getattr(store, fault)()
            try:
                await answered(running, key, "/v1/chat/completions", {**CHAT, "stream": False})
                async with asyncio.timeout(5):
                    while reason not in await reasons(running):
                        await asyncio.sleep(0.02)
            finally:
                store.recover(running)
            async with asyncio.timeout(10):
                while await reasons(running):
                    await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("limits", [KeyLimits(), KeyLimits(token_budget=10**6)], ids=["unlimited", "budget"])
async def test_a_restart_replays_what_a_killed_process_spooled(
    tmp_path: Path, store: Redis | Sqlite, limits: KeyLimits
) -> None:
    async with FakeVllm(tokens=ANSWER, first_delay_s=0.5) as fake, AsyncExitStack() as stack:
        config = with_keys(config_of(f"vllm@{fake.url}"), store.address)
        config["store"] |= {"spool_dir": str(tmp_path / "spool"), "lease_s": LEASE_S}
        keys = await stack.enter_async_context(ring(store.address))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        first = await stack.enter_async_context(replica(tmp_path / "a", config))
        record, key = await keys.issue(limits=limits)

        async def chat(at: Replica) -> int:
            async with session.post(at.url + "/v1/chat/completions", json=CHAT, headers=bearing(key)) as answer:
                assert answer.status == 200, await answer.text()
                return int((await answer.json())["usage"]["total_tokens"])

        asking = [asyncio.create_task(chat(first)) for _ in range(3)]
        await fake.asked(3)
        if isinstance(store, Redis):
            store.full()
        else:
            store.stalled()
        told = sum(await asyncio.gather(*asking))
        first.kill()
        await first.ended()
        if isinstance(store, Redis):
            with store.server.client() as client:
                client.config_set("maxmemory", 0)
        elif store.other is not None:
            store.other.close()
        # Both find the file; one of them replays it.
        await asyncio.gather(*(stack.enter_async_context(replica(tmp_path / name, config)) for name in "bc"))
        async with asyncio.timeout(20):
            while any((tmp_path / "spool").glob("*.jsonl")):
                await asyncio.sleep(0.05)
        [used] = [entry.used for entry in await keys.store.ledger("0000", "9999") if entry.account.key == record.id]
        assert (used.requests, used.tokens) == (3, told)


class Slow:
    """Passes what goes to the store on after `delay_s()` seconds."""

    def __init__(self, port: int, delay_s: Callable[[], float]) -> None:
        self._port = port
        self._delay_s = delay_s
        self._listener = Listener(self._joined)

    async def __aenter__(self) -> Slow:
        await self._listener.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._listener.aclose()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.port}/0"

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with connected(self._port) as (there, beyond):
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pass(reader, beyond, late=True))
                    both.create_task(self._pass(there, writer, late=False))
            except* OSError:
                writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, late: bool) -> None:
        while data := await reader.read(1 << 16):
            if late:
                await asyncio.sleep(self._delay_s())
            writer.write(data)
        raise ConnectionResetError


STALLS_S = (0.3, 0.9)


@pytest.mark.parametrize(
    "with_key", [pytest.param(False, id="no key"), pytest.param(True, id="unlimited key", marks=pytest.mark.slow)]
)
async def test_a_stalling_store_does_not_delay_ordinary_chat(
    tmp_path: Path, redis_server: Server, with_key: bool
) -> None:
    with redis_server.client() as client:
        client.flushall()
    delay_s = 0.0
    async with (
        FakeVllm(tokens=ANSWER) as fake,
        Slow(redis_server.port, lambda: delay_s) as slow,
        ring(redis_server.url) as keys,
    ):
        config = with_keys(config_of(f"vllm@{fake.url}"), slow.url)
        config["store"] |= {"spool_dir": str(tmp_path / "spool"), "deadline_s": 2.0}
        async with gateway(config) as running:
            _, issued = await keys.issue()
            key = issued if with_key else MASTER

            async def took() -> float:
                begun = time.monotonic()
                await answered(running, key, "/v1/chat/completions", {**CHAT, "stream": False})
                return time.monotonic() - begun

            await took()
            base_s = statistics.median([await took() for _ in range(9)])
            for delay_s in STALLS_S:
                await asyncio.sleep(FRESH_S)
                times = [await took() for _ in range(9)]
                # A request that waits for the store even once takes longer by the whole delay.
                assert statistics.median(times) < base_s + delay_s / 2, delay_s
            delay_s = 0.0
