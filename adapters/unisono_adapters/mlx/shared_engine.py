"""Engine process shared by all workers of a gateway; the first worker starts it.

The workers find it in a private folder. A lock, released when its holder ends, ensures that concurrent workers
start only one engine, also after a crash. The engine ends by itself soon after its last connection, so it does
not depend on the worker that started it.
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
from unisono_adapters.mlx.launch import Process, ProcessHandle, spawned
from unisono_adapters.mlx.log import meaning, quoted

_LOG_BYTES = 8192
# Seconds allowed for a process to end after its connection broke.
_CLOSED_S = 0.5


class Shared:
    """Engine of several workers.

    `process` is the handle if this worker started it. Other workers learn its `pid` from the greeting; the
    number is valid until the connection breaks.
    """

    def __init__(self, log: Path, process: Process | None) -> None:
        self.pid = 0 if process is None else process.pid
        self._log = log
        self._process = process

    def kill(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def leave(self) -> None:
        """Release the engine, which ends by itself when unused."""
        if self._process is not None:
            _FORGOTTEN.append(self._process)
            self._process = None

    def ended(self) -> tuple[str, str]:
        # From here on its number may belong to another process.
        self.pid = 0
        return self._describe_exit(), quoted(_end_of(self._log))

    def _describe_exit(self) -> str:
        if self._process is None:
            return ""
        try:
            return meaning(self._process.wait(_CLOSED_S))
        except subprocess.TimeoutExpired:
            # It closed the connection but runs: it may serve other workers.
            _FORGOTTEN.append(self._process)
            return ""


# Engines started but no longer used by this process, which has to reap them.
_FORGOTTEN: list[Process] = []


def joined(folder: Path, model: str, limits: BatchLimits) -> tuple[ProcessHandle, socket.socket]:
    """Return the running engine for a model, or a new one, with a connection to it.

    Blocks, but not until the model is loaded. Raises OSError if the files in `folder` cannot be used or the engine
    cannot be started.
    """
    _FORGOTTEN[:] = [process for process in _FORGOTTEN if process.poll() is None]
    name = hashlib.sha256(repr((model, limits, sys.executable)).encode()).hexdigest()[:16]
    address, log = folder / f"{name}.sock", folder / f"{name}.log"
    with _locked(folder / "lock"):
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
def _locked(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
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
    # Its last output may arrive a moment after its end.
    time.sleep(0.05)
    try:
        with log.open("rb") as written:
            written.seek(max(0, log.stat().st_size - _LOG_BYTES))
            return written.read()
    except OSError:
        return b""
