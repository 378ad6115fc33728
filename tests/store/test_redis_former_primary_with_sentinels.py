"""Tests of a former primary that still accepts writes, because the sentinels have not demoted it yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.contract.servers import Server
from tests.contract.state import response
from tests.listening import Listener
from tests.store.test_redis_former_primary import encode
from unisono.core.state_store import Lease, LogWrite, Retention
from unisono.errors import StoreConflict, StoreUnavailable
from unisono.store.redis import RedisStore
from unisono.store.redis.clients import open_clients

DEADLINE_S = 5.0
REPLICATED = ("appendonly yes", "repl-diskless-sync-delay 0")


class ScriptedSentinel:
    """Sentinel that reports `primary` and `epoch`, and changes nothing."""

    def __init__(self, primary: Server, epoch: int = 0) -> None:
        self.primary = primary
        self.epoch = epoch
        self.listener = Listener(self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replies: dict[bytes, Callable[[], Any]] = {
            b"HELLO": lambda: {b"server": b"redis", b"version": b"7.0.0", b"proto": 3, b"mode": b"sentinel"},
            b"SENTINEL MASTERS": lambda: [self._state()],
            b"SENTINEL GET-MASTER-ADDR-BY-NAME": lambda: [b"127.0.0.1", b"%d" % self.primary.port],
        }
        while line := await reader.readline():
            words = []
            for _ in range(int(line[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            name = b" ".join(words[: 2 if words[0].upper() == b"SENTINEL" else 1]).upper()
            writer.write(encode(replies.get(name, lambda: b"OK")()))
            await writer.drain()

    def _state(self) -> dict[bytes, bytes]:
        fields = {
            "name": "state",
            "ip": "127.0.0.1",
            "port": self.primary.port,
            "flags": "master",
            "num-other-sentinels": 0,
            "config-epoch": self.epoch,
        }
        return {name.encode(): str(value).encode() for name, value in fields.items()}


@dataclass
class Setup:
    """Two servers and a sentinel. At first, `b` is a replica of `a`."""

    a: Server
    b: Server
    sentinel: ScriptedSentinel
    stores: list[RedisStore] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.listener.port}/state/0"

    def open(self, url: str = "") -> RedisStore:
        store = RedisStore(url or self.url, Retention(), deadline_s=DEADLINE_S, replicas=0)
        self.stores.append(store)
        return store

    def promote(self) -> None:
        with self.b.client() as client:
            client.replicaof("NO", "ONE")

    def name(self, primary: Server, epoch: int) -> None:
        """Report another primary, and close the clients' connections to the former one."""
        with self.sentinel.primary.client() as client:
            self.sentinel.primary, self.sentinel.epoch = primary, epoch
            client.client_kill_filter(_type="normal", skipme=True)


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    a, b = Server(tmp_path / "a", REPLICATED), Server(tmp_path / "b", REPLICATED)
    servers = Setup(a, b, ScriptedSentinel(a))
    try:
        a.start()
        b.start()
        await servers.sentinel.listener.start()
        with b.client() as client:
            client.replicaof("127.0.0.1", a.port)
        async with asyncio.timeout(20):
            with a.client() as client:
                while (await asyncio.to_thread(client.info, "replication")).get("slave0", {}).get("state") != "online":
                    await asyncio.sleep(0.02)
        yield servers
    finally:
        for store in servers.stores:
            await store.aclose()
        await servers.sentinel.listener.aclose()
        b.end()
        a.end()


async def start_log(setup: Setup, store: RedisStore) -> Lease:
    """Store a response with one event, and wait until the replica has received both."""
    lease = await store.acquire("ann", "resp_1", "first:resp_1", 60)
    assert lease
    await store.create("ann", response(id="resp_1"), lease=lease, log=LogWrite(events=(b"0",)))
    with setup.a.client() as client:
        assert await asyncio.to_thread(client.wait, 1, 10_000) == 1
    return lease


async def reconnected(store: RedisStore) -> None:
    """Wait until `store` has noticed that its connections were closed."""
    async with asyncio.timeout(20):
        while True:
            with suppress(StoreUnavailable):
                return await store.check()


async def take_over(store: RedisStore, owner: str = "next") -> Lease:
    lease = await store.acquire("ann", "resp_1", f"{owner}:resp_1", 60, force=True)
    assert lease
    return lease


async def test_connections_in_use_are_not_reused_after_the_sentinels_named_another_primary(setup: Setup) -> None:
    clients = open_clients(setup.url, DEADLINE_S)
    assert clients.commands is not None
    assert clients.sentinel is not None
    pool: Any = clients.commands.connection_pool
    try:
        in_use = await pool.get_connection()
        assert in_use.port == setup.a.port
        setup.sentinel.primary = setup.b
        newer = await pool.get_connection()
        assert newer.port == setup.b.port
        await pool.release(newer)
        await pool.release(in_use)
        assert {(await pool.get_connection()).port for _ in range(2)} == {setup.b.port}
    finally:
        await pool.disconnect()
        await clients.client.aclose()
        await clients.sentinel.aclose()


async def test_lease_of_the_other_primary_does_not_permit_writes(setup: Setup) -> None:
    on_a, on_b = setup.open(setup.a.url), setup.open(setup.b.url)
    await start_log(setup, on_a)
    setup.promote()
    lease_a, lease_b = await take_over(on_a), await take_over(on_b, "another")
    assert await on_a.is_log_complete(lease_a, "resp_1") is True
    with pytest.raises(StoreConflict):
        await on_a.is_log_complete(lease_b, "resp_1")
    with pytest.raises(StoreConflict):
        await on_a.log(lease_b, "resp_1", LogWrite(1))


async def test_log_is_incomplete_if_another_server_was_the_primary_meanwhile(setup: Setup) -> None:
    """Name the former primary again before it is demoted, so that its replication id does not change."""
    owner = setup.open()
    lease = await start_log(setup, owner)
    setup.promote()
    setup.name(setup.b, 1)
    # The owner logs a tool call. The former primary does not get this write.
    await reconnected(owner)
    await owner.log(lease, "resp_1", LogWrite(1, (b"call",)))
    setup.name(setup.a, 2)
    store = setup.open()
    assert await store.is_log_complete(await take_over(store), "resp_1") is False
    page = await store.events("ann", "resp_1", 0)
    assert page is not None
    assert page.events == (b"0",)


async def test_log_is_complete_if_its_owner_continued_it_after_the_failovers(setup: Setup) -> None:
    owner = setup.open()
    lease = await start_log(setup, owner)
    setup.promote()
    setup.name(setup.b, 1)
    await reconnected(owner)
    setup.name(setup.a, 2)
    await reconnected(owner)
    await owner.log(lease, "resp_1", LogWrite(1, (b"1",)))
    store = setup.open()
    assert await store.is_log_complete(await take_over(store), "resp_1") is True


async def test_log_of_an_earlier_version_is_complete_if_the_replication_id_is_unchanged(setup: Setup) -> None:
    store = setup.open()
    await start_log(setup, store)
    with setup.a.client() as client:
        [record] = client.keys("t:*:r:resp_1")  # type: ignore[misc]
        assert client.hdel(record, "epoch") == 1
    lease = await take_over(store)
    assert await store.is_log_complete(lease, "resp_1") is True
    # The new owner has recorded the epoch.
    setup.name(setup.a, 2)
    await reconnected(store)
    assert await store.is_log_complete(lease, "resp_1") is False
