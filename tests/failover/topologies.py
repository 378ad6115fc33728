"""Redis with replicas, under Sentinel and as a cluster, and the faults that make them fail over."""

from __future__ import annotations

import asyncio
import random
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.contract.servers import CLUSTERED, Server, agreed, attach, cluster, end
from tests.listening import Listener, connected

REPLICATED = ("appendonly yes", "appendfsync everysec", "maxmemory-policy noeviction", "repl-diskless-sync-delay 0")
STARTING_S = 20.0


@dataclass(frozen=True)
class Pace:
    """Settings that determine the time until a failover. Faults last longer with a slower pace."""

    name: str
    down_after_s: float
    failover_timeout_s: float
    node_timeout_s: float
    settings: tuple[str, ...] = ()


QUICK = Pace("quick", 0.4, 3.0, 2.0)
# Settings recommended by docs/operations.md.
REALISTIC = Pace("realistic", 5.0, 20.0, 5.0, ("min-replicas-to-write 1", "min-replicas-max-lag 10"))


@dataclass
class ReplicationLink:
    """TCP relay from a replica to its primary; it delays data while `is_open` is cleared."""

    to: int
    port: int = 0
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    listener: Listener | None = None

    async def start(self) -> None:
        self.is_open.set()
        self.listener = Listener(self._serve)
        await self.listener.start()
        self.port = self.listener.port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with connected(self.to) as (far_reader, far_writer):
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._copy(reader, far_writer))
                    both.create_task(self._copy(far_reader, writer))
            except* OSError:
                pass

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await self.is_open.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    async def aclose(self) -> None:
        if self.listener:
            await self.listener.aclose()


class Topology(Protocol):
    """A store that can fail over. `faults` are its faults by name; each one returns when the store may recover."""

    url: str

    def failovers(self) -> int:
        """Number of primaries that were replaced so far. A busy host can cause additional failovers."""
        ...

    @property
    def faults(self) -> dict[str, Callable[[random.Random], Awaitable[None]]]: ...


@dataclass
class Sentinels:
    """A primary, one replica connected through `link`, and three sentinels."""

    primary: Server
    replica: Server
    sentinels: list[Server]
    link: ReplicationLink
    pace: Pace

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{sentinel.port}' for sentinel in self.sentinels)}/state/0"

    @property
    def faults(self) -> dict[str, Callable[[random.Random], Awaitable[None]]]:
        return {
            "crash with a delayed replica": self._crash_delayed,
            "crash": self._crash,
            "freeze": self._freeze,
            "split brain": self._split_brain,
            "crash and quick restart": self._restart,
            "ordered": self._manual_failover,
        }

    def failovers(self) -> int:
        with self.sentinels[0].client() as client:
            return int(client.sentinel_master("state")["config-epoch"])

    async def _delay_replication(self) -> None:
        # After some seconds Sentinel connects the replica directly to the primary, so the relay is inserted again.
        with self.replica.client() as client:
            await asyncio.to_thread(client.replicaof, "127.0.0.1", self.link.port)
        await _wait_online(self.primary)
        self.link.is_open.clear()

    async def _crash_delayed(self, chance: random.Random) -> None:
        await self._delay_replication()
        await asyncio.sleep(chance.uniform(0.1, 0.9))
        self.primary.end()
        # Data in the relay is lost, as if the host of the primary had failed.
        await self.link.aclose()
        await asyncio.sleep(self.pace.down_after_s + 2.1)
        await asyncio.to_thread(self.primary.start)

    async def _crash(self, chance: random.Random) -> None:
        self.primary.end()
        await asyncio.sleep(self.pace.down_after_s + chance.uniform(0.6, 2.6))
        await asyncio.to_thread(self.primary.start)

    async def _restart(self, chance: random.Random) -> None:
        self.primary.end()
        await asyncio.sleep(chance.uniform(0.0, 0.5))
        await asyncio.to_thread(self.primary.start)

    async def _freeze(self, chance: random.Random) -> None:
        self.primary.signal(signal.SIGSTOP)
        await asyncio.sleep(self.pace.down_after_s + chance.uniform(0.1, 2.6))
        self.primary.signal(signal.SIGCONT)

    async def _manual_failover(self, chance: random.Random) -> None:
        await asyncio.to_thread(self._request_failover)

    async def _split_brain(self, chance: random.Random) -> None:
        """Promote the replica while the primary accepts writes that are not replicated."""
        await self._delay_replication()
        await asyncio.sleep(chance.uniform(0.1, 0.6))
        await asyncio.to_thread(self._request_failover)
        await asyncio.sleep(chance.uniform(1.0, 2.0))
        await self.link.aclose()

    def _request_failover(self) -> None:
        with self.sentinels[0].client() as client:
            client.execute_command("SENTINEL", "FAILOVER", "state")


@asynccontextmanager
async def sentinels(folder: Path, pace: Pace) -> AsyncIterator[Sentinels]:
    settings = (*REPLICATED, *pace.settings)
    primary, replica = Server(folder / "a", settings), Server(folder / "b", settings)
    lines = (
        f"sentinel monitor state 127.0.0.1 {primary.port} 2",
        f"sentinel down-after-milliseconds state {int(pace.down_after_s * 1000)}",
        f"sentinel failover-timeout state {int(pace.failover_timeout_s * 1000)}",
    )
    sentinel_servers = [Server(folder / f"s{number}", lines, sentinel=True) for number in range(3)]
    link = ReplicationLink(primary.port)
    try:
        primary.start()
        replica.start()
        await link.start()
        with replica.client() as client:
            client.replicaof("127.0.0.1", link.port)
        async with asyncio.timeout(STARTING_S):
            await _wait_online(primary)
            await asyncio.gather(*(asyncio.to_thread(server.start) for server in sentinel_servers))
            for server in sentinel_servers:
                await _wait_discovered(server)
        yield Sentinels(primary, replica, sentinel_servers, link, pace)
    finally:
        await link.aclose()
        end([*sentinel_servers, replica, primary])


async def _wait_online(primary: Server) -> None:
    with primary.client() as client:
        while (await asyncio.to_thread(client.info, "replication")).get("slave0", {}).get("state") != "online":
            await asyncio.sleep(0.05)


async def _wait_discovered(sentinel: Server) -> None:
    """Return when a sentinel has found the replica and the two other sentinels."""
    with sentinel.client() as client:
        while True:
            found = await asyncio.to_thread(client.sentinel_master, "state")
            if (found["num-slaves"], found["num-other-sentinels"]) == (1, 2):
                return
            await asyncio.sleep(0.05)


@dataclass
class Cluster:
    """Three primaries with one replica each."""

    nodes: list[Server]
    replicas: list[Server]
    pace: Pace

    def failovers(self) -> int:
        # Each failover increments the epoch, and each initial primary has one epoch.
        with self.nodes[0].client() as client:
            state = client.execute_command("CLUSTER", "INFO")
        found = re.search(r"cluster_current_epoch:(\d+)", state.decode() if isinstance(state, bytes) else str(state))
        return int(found[1]) - len(self.nodes) if found else 0

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in [*self.nodes, *self.replicas])

    @property
    def faults(self) -> dict[str, Callable[[random.Random], Awaitable[None]]]:
        return {"crash": self._crash, "freeze": self._freeze, "ordered": self._manual_failover, "forced": self._forced}

    async def _crash(self, chance: random.Random) -> None:
        node = chance.choice(self.nodes)
        node.end()
        await asyncio.sleep(self.pace.node_timeout_s + chance.uniform(0.0, 3.0))
        await asyncio.to_thread(node.start)

    async def _freeze(self, chance: random.Random) -> None:
        node = chance.choice(self.nodes)
        node.signal(signal.SIGSTOP)
        await asyncio.sleep(self.pace.node_timeout_s + chance.uniform(-1.0, 3.0))
        node.signal(signal.SIGCONT)

    async def _manual_failover(self, chance: random.Random) -> None:
        await self._promote(chance)

    async def _forced(self, chance: random.Random) -> None:
        await self._promote(chance, "TAKEOVER")

    async def _promote(self, chance: random.Random, *how: str) -> None:
        with chance.choice(self.replicas).client() as client:
            await asyncio.to_thread(client.execute_command, "CLUSTER", "FAILOVER", *how)


@asynccontextmanager
async def cluster_of_six(folder: Path, pace: Pace) -> AsyncIterator[Cluster]:
    settings = (*CLUSTERED, *REPLICATED, *pace.settings, f"cluster-node-timeout {int(pace.node_timeout_s * 1000)}")
    nodes = await asyncio.to_thread(cluster, folder, settings=settings)
    replicas = [Server(folder / f"replica{number}", settings) for number in range(len(nodes))]
    try:
        for node, replica in zip(nodes, replicas, strict=True):
            await asyncio.to_thread(attach, replica, node, nodes)
        async with asyncio.timeout(STARTING_S):
            while not all(agreed(node, 6) for node in nodes + replicas):
                await asyncio.sleep(0.05)
        yield Cluster(nodes, replicas, pace)
    finally:
        end([*nodes, *replicas])
