"""One engine process for all workers of a gateway: whoever needs it first starts it, the others join.

They find each other in a folder that only they are told of. A lock, which ends with whoever holds it, sees to it that
one engine is started where several are wanted at the same moment, after a crash too. The engine ends by itself soon
after the last of them has gone, however they went, so it matters to nobody who started it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unisono_adapters.mlx.jobs import BatchLimits
from unisono_adapters.mlx.log import meaning, quoted
from unisono_adapters.mlx.process import Process, ProcessHandle, spawned

_LOG_BYTES = 8192
_CLOSED_S = 0.5
"""How long the process whose connection broke may take to be gone."""


class Shared:
    """An engine of several workers. `process` is its handle where this one started it; who joined knows its `pid` once
    it has greeted, and until its connection breaks nobody else has that."""

    def __init__(self, log: Path, process: Process | None) -> None:
        self.pid = 0 if process is None else process.pid
        self._log = log
        self._process = process

    def kill(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def leave(self) -> None:
        """Others may need it still; it notices when nobody does."""
        if self._process is not None:
            _FORGOTTEN.append(self._process)
            self._process = None

    def ended(self) -> tuple[str, str]:
        # Its number may be another process's from here on.
        self.pid = 0
        return self._how(), quoted(_end_of(self._log))

    def _how(self) -> str:
        if self._process is None:
            return ""
        try:
            return meaning(self._process.wait(_CLOSED_S))
        except subprocess.TimeoutExpired:
            # It broke the connection and lives: others may be served.
            _FORGOTTEN.append(self._process)
            return ""


_FORGOTTEN: list[Process] = []
"""Engines that this process started and does not use any more. They are this process's to bury."""


def joined(folder: Path, model: str, limits: BatchLimits) -> tuple[ProcessHandle, socket.socket]:
    """The engine for a model with a connection to it; started where there is none. Blocks, though not for as long as
    the model loads. Raises OSError."""
    _FORGOTTEN[:] = [process for process in _FORGOTTEN if process.poll() is None]
    name = hashlib.sha256(repr((model, limits, sys.executable)).encode()).hexdigest()[:16]
    address, log = folder / f"{name}.sock", folder / f"{name}.log"
    with _alone(folder / "lock"):
        connection = _connected(address)
        if connection is not None:
            return Shared(log, None), connection
        address.unlink(missing_ok=True)
        with log.open("wb") as written:
            process, connection = spawned(
                address, model, limits, stdin=subprocess.DEVNULL, stdout=written.fileno(), shared=True
            )
        return Shared(log, process), connection


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _connected(address: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(address))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    connection.setblocking(False)
    return connection


def _end_of(log: Path) -> bytes:
    # What it wrote last may come a moment behind its end.
    time.sleep(0.05)
    try:
        with log.open("rb") as written:
            written.seek(max(0, log.stat().st_size - _LOG_BYTES))
            return written.read()
    except OSError:
        return b""
