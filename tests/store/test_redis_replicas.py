"""A primary and its replica: which writes wait for a copy, and what a failover leaves of a log."""

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
    here = Pair(Server(tmp_path / "a", REPLICATED), Server(tmp_path / "b", REPLICATED))
    try:
        here.primary.start()
        here.replica.start()
        await here.follow()
        yield here
    finally:
        for server in (here.replica, here.primary):
            if server.process is not None:
                server.signal(signal.SIGCONT)
            server.end()


@pytest.mark.slow
async def test_by_default_a_write_waits_for_a_replica_where_there_is_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        # A failover may be under way, with the replica promoted: nothing is acknowledged without a copy yet.
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
        talk = conversation()
        await store.create_conversation("ann", talk, [said("first", "msg_1")])
        pair.replica.end()
        await pair.connected(0)
        with pytest.raises(StoreUnavailable, match="replicas"):
            await store.append("ann", talk.id, [said("second", "msg_2")])
        found = await store.conversation_items("ann", talk.id)
        assert found is not None
        assert [one.id for one in found] == ["msg_1", "msg_2"]
        assert await store.lapsed() == ()
        assert await store.traces("ann") == ()
    finally:
        await store.aclose()


async def begin(store: RedisStore, id: str) -> Lease:
    lease = await store.acquire("ann", id, "first", 60)
    assert lease
    await store.create("ann", response(id=id), lease=lease, log=LogWrite(events=(b"0",)))
    return lease


async def inherit(store: RedisStore, id: str) -> Lease:
    lease = await store.acquire("ann", id, "next", 60, force=True)
    assert lease
    return lease


async def test_a_log_is_complete_after_a_failover_only_if_its_owner_continued_it(pair: Pair) -> None:
    store, promoted = pair.open(1), pair.open(0, pair.replica)
    try:
        lost, continued = await begin(store, "resp_lost"), await begin(store, "resp_continued")
        pair.primary.end()
        pair.promote()
        # Without content, and not from the beginning, a write proves that the log ends where its owner left it.
        await promoted.log(continued, "resp_continued", LogWrite(1))
        await promoted.log(lost, "resp_lost", LogWrite())
        assert await promoted.is_log_complete(await inherit(promoted, "resp_continued"), "resp_continued") is True
        heir = await inherit(promoted, "resp_lost")
        assert await promoted.is_log_complete(heir, "resp_lost") is False
        # What its new owner writes brings nothing back.
        await promoted.log(heir, "resp_lost", LogWrite(1, (b"1",)))
        later = await promoted.acquire("ann", "resp_lost", "third", 60, force=True)
        assert later
        assert await promoted.is_log_complete(later, "resp_lost") is False
    finally:
        await store.aclose()
        await promoted.aclose()


async def test_after_a_failover_an_owner_without_its_lease_writes_nothing(pair: Pair) -> None:
    """Another owner may have had the response at the former primary, and the failover may have lost its fence."""
    store, promoted = pair.open(1), pair.open(0, pair.replica)
    try:
        lease = await begin(store, "resp_lapsed")
        await store.release(lease)
        pair.primary.end()
        pair.promote()
        with pytest.raises(StoreConflict):
            await promoted.log(lease, "resp_lapsed", LogWrite(1, (b"1",)))
    finally:
        await store.aclose()
        await promoted.aclose()


async def test_a_response_of_an_earlier_version_counts_as_complete(pair: Pair) -> None:
    store = pair.open(1)
    try:
        await begin(store, "resp_old")
        with pair.primary.client() as client:
            [record] = client.keys("t:*:r:resp_old")  # type: ignore[misc]
            client.hdel(record, "history")
        assert await store.is_log_complete(await inherit(store, "resp_old"), "resp_old") is True
    finally:
        await store.aclose()
