"""Tests with Sentinel and a cluster: failovers, moved slots and stalled nodes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from redis.crc import key_slot

from tests.contract.servers import CLUSTERED, SLOTS, Server, attach, cluster, end, move_slot
from tests.contract.state import response
from tests.listening import Listener, connected
from unisono.core.state_store import Retention, Status, StoredResponse
from unisono.errors import StoreUnavailable
from unisono.store.redis import RedisStore, keys, response_scripts

pytestmark = [pytest.mark.alone, pytest.mark.slow]


@dataclass
class Relay:
    """Loopback relay between a primary and its replica that can be paused."""

    to: int
    port: int = 0
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    listener: Listener | None = None

    async def start(self) -> None:
        self.flowing.set()
        self.listener = Listener(self._serve)
        await self.listener.start()
        self.port = self.listener.port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with connected(self.to) as (target_reader, target_writer):
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass(reader, target_writer))
                    group.create_task(self._pass(target_reader, writer))
            except* OSError:
                pass

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await self.flowing.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    async def aclose(self) -> None:
        self.flowing.set()
        if self.listener:
            await self.listener.aclose()


@dataclass
class Pair:
    """Primary, replica that follows it over a relay, and sentinel that monitors both."""

    primary: Server
    replica: Server
    sentinel: Server
    relay: Relay

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/state/0"


# Deadline for a busy host: a write waits for its replica for 60 % of it.
BUSY_S = 5.0
STALL_S = 1.0
QUICK = ("appendonly yes", "repl-diskless-sync-delay 0")


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    primary, replica = Server(tmp_path / "a", QUICK), Server(tmp_path / "b", QUICK)
    sentinel_config = (
        f"sentinel monitor state 127.0.0.1 {primary.port} 1",
        "sentinel down-after-milliseconds state 400",
        "sentinel failover-timeout state 3000",
    )
    sentinel = Server(tmp_path / "s", sentinel_config, sentinel=True)
    relay = Relay(primary.port)
    try:
        primary.start()
        replica.start()
        await relay.start()
        with replica.client() as client:
            client.replicaof("127.0.0.1", relay.port)
        with primary.client() as client:
            while (await asyncio.to_thread(client.info, "replication")).get("slave0", {}).get("state") != "online":
                await asyncio.sleep(0.05)
        await asyncio.to_thread(sentinel.start)
        yield Pair(primary, replica, sentinel, relay)
    finally:
        await relay.aclose()
        end([sentinel, replica, primary])


async def write_until(store: RedisStore, stop: asyncio.Event, acknowledged_ids: list[str]) -> None:
    """Write until `stop` is set, and collect the ids of acknowledged writes."""
    while not stop.is_set():
        completed = response(status=Status.COMPLETED)
        with contextlib.suppress(StoreUnavailable):
            await store.create("ann", completed)
            acknowledged_ids.append(completed.id)
        await asyncio.sleep(0.002)


async def test_failover_loses_no_replicated_write(pair: Pair) -> None:
    with_replica = RedisStore(pair.url, Retention(), deadline_s=BUSY_S, replicas=1)
    without_replica = RedisStore(pair.url, Retention(), deadline_s=BUSY_S, replicas=0)
    assert await with_replica.start() == ()
    assert any("failover" in warning for warning in await without_replica.start())
    finished = asyncio.Event()
    acknowledged_ids: list[str] = []
    unsafe_ids: list[str] = []
    writers = [
        asyncio.create_task(write_until(*each))
        for each in ((with_replica, finished, acknowledged_ids), (without_replica, finished, unsafe_ids))
    ]
    async with asyncio.timeout(20):
        while len(acknowledged_ids) <= 20:
            await asyncio.sleep(0.05)
    pair.relay.flowing.clear()
    await asyncio.sleep(0.4)
    finished.set()
    await asyncio.gather(*writers)
    pair.primary.end()
    deadline = time.monotonic() + 60
    while True:
        try:
            found = await without_replica.responses("ann", acknowledged_ids)
            lost = (await without_replica.responses("ann", unsafe_ids)).count(None)
            await without_replica.secret("after", b"x")
            break
        except StoreUnavailable:
            assert time.monotonic() < deadline, "the store does not recover"
            await asyncio.sleep(0.1)
    assert len(acknowledged_ids) > 20
    assert all(found)
    # The setup does lose unreplicated writes; otherwise the previous assertion would prove nothing.
    assert lost > 0
    # Without a replica, no write is acknowledged.
    with pytest.raises(StoreUnavailable):
        await with_replica.create("ann", response())
    for store in (with_replica, without_replica):
        await store.aclose()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Server]]:
    servers = cluster(tmp_path)
    try:
        yield servers
    finally:
        end(servers)


async def test_stalled_cluster_node_affects_only_its_own_keys(nodes: list[Server]) -> None:
    urls = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    # Shorter than the time after which the other nodes consider the stalled one failed.
    store = RedisStore(f"redis+cluster://{urls}", Retention(), deadline_s=STALL_S)
    warnings = await store.start()
    assert warnings == ()
    stored = [response(input=()) for _ in range(30)]
    for each in stored:
        await store.create("ann", each)
    nodes[1].signal(signal.SIGSTOP)
    try:
        # Each read ends at its own deadline.
        async with asyncio.timeout(2 * STALL_S):
            results = await asyncio.gather(
                *(store.responses("ann", [each.id]) for each in stored), return_exceptions=True
            )
    finally:
        nodes[1].signal(signal.SIGCONT)
    failed = sum(isinstance(result, StoreUnavailable) for result in results)
    assert 0 < failed < 30
    assert all(result == (each,) for each, result in zip(stored, results, strict=True) if isinstance(result, tuple))
    await asyncio.sleep(0.3)
    assert await store.responses("ann", [each.id for each in stored]) == tuple(stored)
    await store.aclose()


def load_scripts(*servers: Server) -> None:
    """Load the script, so that a write does not wait twice for its replica.

    Without it, the server is sent the script in a second attempt.
    """
    for server in servers:
        with server.client() as client:
            client.script_load(response_scripts.SAVE.text)


def keys_of(replica: Server) -> set[str]:
    """Return the keys of a replica.

    A read of a single key may be redirected, because a replica learns of moved slots with a delay.
    """
    with replica.client() as client:
        found: list[bytes] = client.keys()  # type: ignore[assignment]
    return {key.decode() for key in found}


def slot_of(one: StoredResponse) -> int:
    return key_slot(keys.response("ann", one.id, one.id)[0].encode())


async def test_redirected_write_waits_for_the_replica_of_the_new_node(nodes: list[Server], tmp_path: Path) -> None:
    """Check the replica of the new node.

    The former node has a replica, which must not acknowledge the write instead, and vice versa.
    """
    replicated, unreplicated = nodes[0], nodes[1]
    replica = Server(tmp_path / "replica", (*CLUSTERED, "repl-diskless-sync-delay 0"))
    store = RedisStore(f"redis+cluster://127.0.0.1:{replicated.port}", Retention(), deadline_s=BUSY_S, replicas=1)
    stored = response_on_first_node()
    try:
        await asyncio.to_thread(attach, replica, replicated, nodes)
        load_scripts(replicated, unreplicated)
        await store.create("ann", stored)
        with replicated.client() as former:
            former.flushall()
        move_slot(slot_of(stored), nodes, unreplicated)
        with pytest.raises(StoreUnavailable, match="replicas"):
            await store.create("ann", stored)
        with unreplicated.client() as client:
            # The write was redirected; only its replication is missing.
            assert client.exists(keys.response("ann", stored.id, stored.id)[0])
            client.flushall()
        move_slot(slot_of(stored), nodes, replicated)
        await store.create("ann", stored)
        assert keys.response("ann", stored.id, stored.id)[0] in keys_of(replica)
    finally:
        await store.aclose()
        replica.end()


async def test_cluster_write_waits_for_the_replica_of_its_own_node(nodes: list[Server], tmp_path: Path) -> None:
    replica = Server(tmp_path / "replica", (*CLUSTERED, "repl-diskless-sync-delay 0"))
    store = RedisStore(f"redis+cluster://127.0.0.1:{nodes[0].port}", Retention(), deadline_s=BUSY_S, replicas=1)
    try:
        await asyncio.to_thread(attach, replica, nodes[0], nodes)
        load_scripts(*nodes, replica)
        sent = [response(input=()) for _ in range(20)] + [response_on_first_node(), response_on_other_node()]
        results = await asyncio.gather(*(store.create("ann", one) for one in sent), return_exceptions=True)
        for one, result in zip(sent, results, strict=True):
            if slot_of(one) < SLOTS // 3:
                assert result is None
            else:
                assert isinstance(result, StoreUnavailable)
                assert "replicas" in str(result)
        done = [one for one, result in zip(sent, results, strict=True) if result is None]
        assert {keys.response("ann", one.id, one.id)[0] for one in done} <= keys_of(replica)
        # Writes discover the promoted replica, which has no replica itself.
        nodes[0].end()
        async with asyncio.timeout(60):
            while True:
                [ended] = await asyncio.gather(store.create("ann", done[0]), return_exceptions=True)
                assert isinstance(ended, StoreUnavailable)
                if "replicas" in str(ended):
                    break
                await asyncio.sleep(0.1)
    finally:
        await store.aclose()
        replica.end()


def response_on_first_node() -> StoredResponse:
    return next(one for one in iter(lambda: response(input=()), None) if slot_of(one) < SLOTS // 3)


def response_on_other_node() -> StoredResponse:
    return next(one for one in iter(lambda: response(input=()), None) if slot_of(one) >= SLOTS // 3)
