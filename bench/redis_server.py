"""Redis server of a run, with its log on disk."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

from bench.processes import Process, StartError, free_port


def start_redis(stack: ExitStack, folder: Path, cpus: frozenset[int]) -> tuple[int, Process]:
    """Return the port and the process of a Redis that ends with `stack`. Raises StartError."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise StartError("no redis-server or valkey-server on PATH (Debian: redis-server)")
    port = free_port()
    settings = {"bind": "127.0.0.1", "port": str(port), "dir": str(folder), "save": ""}
    settings |= {"appendonly": "yes", "appendfsync": "everysec"}
    command = [program, *(word for name, value in settings.items() for word in (f"--{name}", value))]
    process = stack.enter_context(Process("redis", command, folder, cpus))
    process.wait_ready(port, "")
    return port, process
