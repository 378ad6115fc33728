"""Real Redis (or Valkey) servers on free loopback ports, each in a folder of its own and ended by its process id.

A machine without one fails here, loudly: state that replicas share is not tested against an imitation.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import redis

STARTING_S = 10.0


def program() -> str:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    raise RuntimeError("no redis-server or valkey-server on PATH: `make test` installs one (Debian: redis-server)")


def free_port() -> int:
    """Below 55536, since a cluster node takes the port 10000 above its own too."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 55_000:
            return port


@dataclass
class Server:
    """One process. `settings` are lines of its configuration file."""

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
                    client.ping()
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


def cluster(folder: Path, size: int = 3) -> list[Server]:
    """That many primaries that share the slots, started and agreed. Ends them itself when they do not agree."""
    settings = ("cluster-enabled yes", "cluster-node-timeout 2000", "appendonly yes", "maxmemory-policy noeviction")
    nodes = [Server(folder / f"node{number}", settings) for number in range(size)]
    try:
        for number, node in enumerate(nodes):
            node.start()
            with node.client() as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                slots = range(SLOTS * number // size, SLOTS * (number + 1) // size)
                client.execute_command("CLUSTER", "ADDSLOTS", *slots)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        deadline = time.monotonic() + STARTING_S
        while not all(agreed(node, size) for node in nodes):
            if time.monotonic() > deadline:
                raise RuntimeError("the nodes of the cluster do not find each other")
            time.sleep(0.05)
    except BaseException:
        end(nodes)
        raise
    return nodes


def agreed(node: Server, size: int) -> bool:
    with node.client() as client:
        state = client.execute_command("CLUSTER", "INFO")
    text = state.decode() if isinstance(state, bytes) else str(state)
    return "cluster_state:ok" in text and f"cluster_known_nodes:{size}\r" in text


def end(servers: Sequence[Server]) -> None:
    for server in servers:
        server.end()
