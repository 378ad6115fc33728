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
