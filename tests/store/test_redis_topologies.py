"""Behind Sentinel and on a cluster: what was acknowledged outlives a failover, and one node in trouble is one node."""

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
from unisono.store.redis import RedisStore, keys, scripts

pytestmark = [pytest.mark.alone, pytest.mark.slow]


@dataclass
class Relay:
    """A loopback connection that can be held up: the link between a primary and its replica."""

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
        async with connected(self.to) as (far_reader, far_writer):
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pass(reader, far_writer))
                    both.create_task(self._pass(far_reader, writer))
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
    """A primary, a replica that follows it over a relay, and a sentinel that watches both."""

    primary: Server
    replica: Server
    sentinel: Server
    relay: Relay

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/state/0"


# Long enough for a busy host: a write waits for its copy for 60 % of it.
BUSY_S = 5.0
STALL_S = 1.0
QUICK = ("appendonly yes", "repl-diskless-sync-delay 0")


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    primary, replica = Server(tmp_path / "a", QUICK), Server(tmp_path / "b", QUICK)
    watching = (
        f"sentinel monitor state 127.0.0.1 {primary.port} 1",
        "sentinel down-after-milliseconds state 400",
        "sentinel failover-timeout state 3000",
    )
    sentinel = Server(tmp_path / "s", watching, sentinel=True)
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


async def acknowledged(store: RedisStore, until: asyncio.Event, kept: list[str]) -> None:
    """Write until told to stop, and add to `kept` what the store said it has."""
    while not until.is_set():
        one = response(status=Status.COMPLETED)
        with contextlib.suppress(StoreUnavailable):
            await store.create("ann", one)
            kept.append(one.id)
        await asyncio.sleep(0.002)


async def test_a_failover_loses_nothing_that_waited_for_a_replica(pair: Pair) -> None:
    careful = RedisStore(pair.url, Retention(), deadline_s=BUSY_S, replicas=1)
    careless = RedisStore(pair.url, Retention(), deadline_s=BUSY_S, replicas=0)
    assert await careful.start() == ()
    assert any("failover" in warning for warning in await careless.start())
    over = asyncio.Event()
    kept: list[str] = []
    hoped: list[str] = []
    writing = [asyncio.create_task(acknowledged(*each)) for each in ((careful, over, kept), (careless, over, hoped))]
    async with asyncio.timeout(20):
        while len(kept) <= 20:
            await asyncio.sleep(0.05)
    pair.relay.flowing.clear()
    await asyncio.sleep(0.4)
    over.set()
    await asyncio.gather(*writing)
    pair.primary.end()
    deadline = time.monotonic() + 60
    while True:
        try:
            found = await careless.responses("ann", kept)
            lost = (await careless.responses("ann", hoped)).count(None)
            await careless.secret("after", b"x")
            break
        except StoreUnavailable:
            assert time.monotonic() < deadline, "the store does not come back"
            await asyncio.sleep(0.1)
    assert len(kept) > 20
    assert all(found)
    # The rig does lose what did not wait: without that, the line above would prove nothing.
    assert lost > 0
    # With no replica left, nothing is claimed to be safe.
    with pytest.raises(StoreUnavailable):
        await careful.create("ann", response())
    for store in (careful, careless):
        await store.aclose()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Server]]:
    made = cluster(tmp_path)
    try:
        yield made
    finally:
        end(made)


async def test_one_stalled_node_of_a_cluster_is_one_stalled_node(nodes: list[Server]) -> None:
    urls = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    # Shorter than the time after which the other nodes give the stalled one up.
    store = RedisStore(f"redis+cluster://{urls}", Retention(), deadline_s=STALL_S)
    warnings = await store.start()
    assert warnings == ()
    kept = [response(input=()) for _ in range(30)]
    for one in kept:
        await store.create("ann", one)
    nodes[1].signal(signal.SIGSTOP)
    try:
        # Each of them ends at its own deadline.
        async with asyncio.timeout(2 * STALL_S):
            results = await asyncio.gather(*(store.responses("ann", [one.id]) for one in kept), return_exceptions=True)
    finally:
        nodes[1].signal(signal.SIGCONT)
    failed = sum(isinstance(result, StoreUnavailable) for result in results)
    assert 0 < failed < 30
    assert all(result == (one,) for one, result in zip(kept, results, strict=True) if isinstance(result, tuple))
    await asyncio.sleep(0.3)
    assert await store.responses("ann", [one.id for one in kept]) == tuple(kept)
    await store.aclose()


def load_scripts(*servers: Server) -> None:
    """Prevent that a write waits twice for its copy: a server without the script is sent it in a second attempt."""
    for server in servers:
        with server.client() as client:
            client.script_load(scripts.SAVE.text)


def keys_of(replica: Server) -> set[str]:
    """The keys that a replica has. A single key may be redirected, as a replica learns of moved slots with delay."""
    with replica.client() as client:
        found: list[bytes] = client.keys()  # type: ignore[assignment]
    return {key.decode() for key in found}


def slot_of(one: StoredResponse) -> int:
    return key_slot(keys.response("ann", one.id, one.id)[0].encode())


async def test_on_a_cluster_a_redirected_write_waits_for_the_replica_of_its_new_node(
    nodes: list[Server], tmp_path: Path
) -> None:
    """The former node has a replica, which must not acknowledge the write in place of the new one's, and vice versa."""
    copied, alone = nodes[0], nodes[1]
    replica = Server(tmp_path / "replica", (*CLUSTERED, "repl-diskless-sync-delay 0"))
    store = RedisStore(f"redis+cluster://127.0.0.1:{copied.port}", Retention(), deadline_s=BUSY_S, replicas=1)
    one = in_slots_of_the_first_node()
    try:
        await asyncio.to_thread(attach, replica, copied, nodes)
        load_scripts(copied, alone)
        await store.create("ann", one)
        with copied.client() as former:
            former.flushall()
        move_slot(slot_of(one), nodes, alone)
        with pytest.raises(StoreUnavailable, match="replicas"):
            await store.create("ann", one)
        with alone.client() as client:
            # The write was redirected and lacks only its copy.
            assert client.exists(keys.response("ann", one.id, one.id)[0])
            client.flushall()
        move_slot(slot_of(one), nodes, copied)
        await store.create("ann", one)
        assert keys.response("ann", one.id, one.id)[0] in keys_of(replica)
    finally:
        await store.aclose()
        replica.end()


async def test_on_a_cluster_a_write_waits_for_the_replica_of_its_own_node(nodes: list[Server], tmp_path: Path) -> None:
    replica = Server(tmp_path / "replica", (*CLUSTERED, "repl-diskless-sync-delay 0"))
    store = RedisStore(f"redis+cluster://127.0.0.1:{nodes[0].port}", Retention(), deadline_s=BUSY_S, replicas=1)
    try:
        await asyncio.to_thread(attach, replica, nodes[0], nodes)
        load_scripts(*nodes, replica)
        sent = [response(input=()) for _ in range(20)] + [in_slots_of_the_first_node(), in_slots_of_the_others()]
        results = await asyncio.gather(*(store.create("ann", one) for one in sent), return_exceptions=True)
        for one, result in zip(sent, results, strict=True):
            if slot_of(one) < SLOTS // 3:
                assert result is None
            else:
                assert isinstance(result, StoreUnavailable)
                assert "replicas" in str(result)
        done = [one for one, result in zip(sent, results, strict=True) if result is None]
        assert {keys.response("ann", one.id, one.id)[0] for one in done} <= keys_of(replica)
        # Writes alone find the promoted replica, which has none of its own.
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


def in_slots_of_the_first_node() -> StoredResponse:
    return next(one for one in iter(lambda: response(input=()), None) if slot_of(one) < SLOTS // 3)


def in_slots_of_the_others() -> StoredResponse:
    return next(one for one in iter(lambda: response(input=()), None) if slot_of(one) >= SLOTS // 3)
