"""Tests with a primary and a replica: replicated writes, and logs after a failover."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.servers import Server
from tests.contract.state import conversation, response, said
from unisono.core.state_store import Lease, LogWrite, Retention
from unisono.errors import StoreConflict, StoreUnavailable
from unisono.store.redis import RedisStore, connection

DEADLINE_S = 2.0
REPLICATED = ("appendonly yes", "maxmemory-policy noeviction", "repl-diskless-sync-delay 0", "repl-timeout 2")


@dataclass
class Pair:
    primary: Server
    replica: Server

    def open(self, replicas: int | None, server: Server | None = None) -> RedisStore:
        return RedisStore((server or self.primary).url, Retention(), deadline_s=DEADLINE_S, replicas=replicas)

    async def connected(self, count: int) -> None:
        with self.primary.client() as client:
            async with asyncio.timeout(20):
                while (await asyncio.to_thread(client.info, "replication"))["connected_slaves"] != count:
                    await asyncio.sleep(0.02)

    async def follow(self) -> None:
        with self.replica.client() as client:
            client.replicaof("127.0.0.1", self.primary.port)
        with self.primary.client() as client:
            async with asyncio.timeout(20):
                while (await asyncio.to_thread(client.info, "replication")).get("slave0", {}).get("state") != "online":
                    await asyncio.sleep(0.02)

    def promote(self) -> None:
        with self.replica.client() as client:
            client.replicaof("NO", "ONE")


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    servers = Pair(Server(tmp_path / "a", REPLICATED), Server(tmp_path / "b", REPLICATED))
    try:
        servers.primary.start()
        servers.replica.start()
        await servers.follow()
        yield servers
    finally:
        for server in (servers.replica, servers.primary):
            if server.process is not None:
                server.signal(signal.SIGCONT)
            server.end()


@pytest.mark.slow
async def test_write_waits_for_a_replica_if_one_exists(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REPLICA_GRACE_S", 6.0)
    store = pair.open(None)
    try:
        assert await store.start() == ()
        await store.create("ann", response())
        pair.replica.signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match="replicas"):
            await store.create("ann", response())
        pair.replica.end()
        await pair.connected(0)
        # A failover may be in progress with the replica promoted, so unreplicated writes are not acknowledged yet.
        for write in (store.create("ann", response()), store.check()):
            with pytest.raises(StoreUnavailable, match="replicas"):
                await write
        async with asyncio.timeout(20):
            while True:
                with suppress(StoreUnavailable):
                    await store.create("ann", response())
                    break
        pair.replica.start()
        await pair.follow()
        async with asyncio.timeout(20):
            while True:
                await store.check()
                pair.replica.signal(signal.SIGSTOP)
                try:
                    await store.create("ann", response())
                except StoreUnavailable:
                    break
                finally:
                    pair.replica.signal(signal.SIGCONT)
                await asyncio.sleep(0.1)
    finally:
        await store.aclose()


async def test_reads_need_no_replica(pair: Pair) -> None:
    store = pair.open(1)
    try:
        chat = conversation()
        await store.create_conversation("ann", chat, [said("first", "msg_1")])
        pair.replica.end()
        await pair.connected(0)
        with pytest.raises(StoreUnavailable, match="replicas"):
            await store.append("ann", chat.id, [said("second", "msg_2")])
        items = await store.conversation_items("ann", chat.id)
        assert items is not None
        assert [item.id for item in items] == ["msg_1", "msg_2"]
        assert await store.lapsed() == ()
        assert await store.traces("ann") == ()
    finally:
        await store.aclose()


async def start_log(store: RedisStore, id: str) -> Lease:
    lease = await store.acquire("ann", id, f"first:{id}", 60)
    assert lease
    await store.create("ann", response(id=id), lease=lease, log=LogWrite(events=(b"0",)))
    return lease


async def take_over(store: RedisStore, id: str) -> Lease:
    lease = await store.acquire("ann", id, f"next:{id}", 60, force=True)
    assert lease
    return lease


async def test_log_is_complete_after_a_failover_if_its_owner_continued_it(pair: Pair) -> None:
    store, promoted = pair.open(1), pair.open(0, pair.replica)
    try:
        lost_lease, continued_lease = await start_log(store, "resp_lost"), await start_log(store, "resp_continued")
        pair.primary.end()
        pair.promote()
        # A write without content at a position other than 0 proves that the log ends where its owner left it.
        await promoted.log(continued_lease, "resp_continued", LogWrite(1))
        await promoted.log(lost_lease, "resp_lost", LogWrite())
        assert await promoted.is_log_complete(await take_over(promoted, "resp_continued"), "resp_continued") is True
        new_lease = await take_over(promoted, "resp_lost")
        assert await promoted.is_log_complete(new_lease, "resp_lost") is False
        # Writes of the new owner restore nothing.
        await promoted.log(new_lease, "resp_lost", LogWrite(1, (b"1",)))
        later = await promoted.acquire("ann", "resp_lost", "third:resp_lost", 60, force=True)
        assert later
        assert await promoted.is_log_complete(later, "resp_lost") is False
    finally:
        await store.aclose()
        await promoted.aclose()


async def test_owner_without_its_lease_cannot_write_after_a_failover(pair: Pair) -> None:
    """Write with a lease that was released before the failover.

    Another owner may have had the response on the former primary, and the failover may have lost its fence.
    """
    store, promoted = pair.open(1), pair.open(0, pair.replica)
    try:
        lease = await start_log(store, "resp_lapsed")
        await store.release(lease)
        pair.primary.end()
        pair.promote()
        with pytest.raises(StoreConflict):
            await promoted.log(lease, "resp_lapsed", LogWrite(1, (b"1",)))
    finally:
        await store.aclose()
        await promoted.aclose()


async def test_response_of_an_earlier_version_counts_as_complete(pair: Pair) -> None:
    store = pair.open(1)
    try:
        await start_log(store, "resp_old")
        with pair.primary.client() as client:
            [record] = client.keys("t:*:r:resp_old")  # type: ignore[misc]
            client.hdel(record, "history")
        assert await store.is_log_complete(await take_over(store, "resp_old"), "resp_old") is True
    finally:
        await store.aclose()
