"""Real Redis (or Valkey) servers on free loopback ports, each in its own folder.

The tests fail if neither program is installed. Shared state is not tested against an imitation.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import redis

STARTING_S = 20.0


def program() -> str:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    raise RuntimeError("no redis-server or valkey-server on PATH: `make test` installs one (Debian: redis-server)")


# Ports below those of outgoing connections, which the system takes from 32768 up. A server may be restarted on its
# port, so neither its port nor its cluster bus port (10000 above) may be taken meanwhile.
FIRST_PORT, LAST_PORT = 10_000, 19_999
BUS_OFFSET = 10_000
_ports = iter(range(random.SystemRandom().randrange(FIRST_PORT, LAST_PORT - 2_000), LAST_PORT))


def free_port() -> int:
    """Return a port that is free, as is its cluster bus port.

    One process never returns a port twice.
    """
    return next(port for port in _ports if _is_free(port) and _is_free(port + BUS_OFFSET))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@dataclass
class Server:
    """Redis server process; `settings` are lines of its configuration file."""

    folder: Path
    settings: Sequence[str] = ()
    sentinel: bool = False
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "server.conf"
        if not config.exists():
            lines = ["bind 127.0.0.1", f"port {self.port}", f"dir {self.folder}", "daemonize no", *self.settings]
            if not self.sentinel:
                lines += ['save ""']
            config.write_text("\n".join(lines) + "\n")
        arguments = [program(), str(config), *(["--sentinel"] if self.sentinel else [])]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(arguments, stdout=log, stderr=log)
        deadline = time.monotonic() + STARTING_S
        while True:
            try:
                with self.client() as client:
                    info = client.info()
                # Another server may occupy the port; this one is then about to exit.
                if info["process_id"] != self.process.pid:
                    raise redis.ConnectionError("another server answers")
                # It answers this command already while it reads its log.
                if info.get("loading"):
                    raise redis.BusyLoadingError
            except redis.RedisError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise RuntimeError((self.folder / "log").read_text()[-2_000:]) from None
                time.sleep(0.02)
            else:
                return self

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, host="127.0.0.1", socket_timeout=5)

    def signal(self, number: signal.Signals) -> None:
        assert self.process
        os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


SLOTS = 16_384
CLUSTERED = ("cluster-enabled yes", "cluster-node-timeout 2000", "appendonly yes", "maxmemory-policy noeviction")


def cluster(folder: Path, size: int = 3, settings: Sequence[str] = CLUSTERED) -> list[Server]:
    """Start a cluster of `size` primaries that share the slots, and wait until they agree.

    Stops them if they do not agree.
    """
    nodes = [Server(folder / f"node{number}", settings) for number in range(size)]
    try:
        for number, node in enumerate(nodes):
            node.start()
            with node.client() as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                slots = range(SLOTS * number // size, SLOTS * (number + 1) // size)
                client.execute_command("CLUSTER", "ADDSLOTS", *slots)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        _until(lambda: all(agreed(node, size) for node in nodes))
    except BaseException:
        end(nodes)
        raise
    return nodes


def agreed(node: Server, size: int) -> bool:
    with node.client() as client:
        text = _text(client.execute_command("CLUSTER", "INFO"))
    return "cluster_state:ok" in text and f"cluster_known_nodes:{size}\r" in text


def attach(replica: Server, primary: Server, nodes: Sequence[Server]) -> None:
    """Start `replica` in the cluster of `nodes`.

    Returns when it is in sync and every node knows its primary.
    """
    replica.start()
    with primary.client() as first, replica.client() as second:
        name = _text(first.execute_command("CLUSTER", "MYID"))
        first.execute_command("CLUSTER", "MEET", "127.0.0.1", replica.port)
        _until(lambda: name in _text(second.execute_command("CLUSTER", "NODES")))
        second.execute_command("CLUSTER", "REPLICATE", name)
        _until(lambda: first.info("replication").get("slave0", {}).get("state") == "online")
        # A primary that does not know the replica does not vote for it, and a failed election is repeated late.
        replicating = re.compile(
            rf"^{_text(second.execute_command('CLUSTER', 'MYID'))} .* slave {name} .* connected", re.M
        )
    for node in nodes:
        _until(partial(_lists, node, replicating))


def move_slot(slot: int, nodes: Sequence[Server], to: Server) -> None:
    """Move a slot to `to` and inform each node.

    Raises its configuration epoch, so that no other node takes the slot back.
    """
    with to.client() as client:
        client.execute_command("CLUSTER", "BUMPEPOCH")
        name = client.execute_command("CLUSTER", "MYID")
    for node in [to, *(other for other in nodes if other is not to)]:
        with node.client() as client:
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", name)


def _lists(node: Server, pattern: re.Pattern[str]) -> bool:
    with node.client() as client:
        return pattern.search(_text(client.execute_command("CLUSTER", "NODES"))) is not None


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + STARTING_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("the nodes of the cluster do not agree")
        time.sleep(0.05)


def _text(answer: object) -> str:
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def end(servers: Sequence[Server]) -> None:
    for server in servers:
        server.end()
