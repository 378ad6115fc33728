"""Engine process that all workers of a gateway share; the first worker starts it.

The workers find the socket of the engine in a private folder. A lock on a file ensures that concurrent workers start
only one engine. The lock is released even if the worker that holds it crashes. The engine does not depend on the
worker that started it: it exits by itself shortly after its last connection closes.
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
# Seconds to wait for the end of a process whose connection broke.
_CLOSED_S = 0.5


class Shared:
    """Handle of an engine that several workers share.

    `process` is None unless this worker started the engine. The other workers learn the `pid` from the engine's
    greeting. The `pid` is valid until the connection breaks; 0 means that it is not known.
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
        """Release the engine, which exits by itself when no worker is connected."""
        if self._process is not None:
            _FORGOTTEN.append(self._process)
            self._process = None

    def ended(self) -> tuple[str, str]:
        # The process may have ended, so the system may give its pid to another process.
        self.pid = 0
        return self._describe_exit(), quoted(_end_of(self._log))

    def _describe_exit(self) -> str:
        if self._process is None:
            return ""
        try:
            return meaning(self._process.wait(_CLOSED_S))
        except subprocess.TimeoutExpired:
            # The engine closed this connection, but still runs and may serve other workers.
            _FORGOTTEN.append(self._process)
            return ""


# Engines that this process started and no longer uses. It must still reap them when they end.
_FORGOTTEN: list[Process] = []


def joined(folder: Path, model: str, limits: BatchLimits) -> tuple[ProcessHandle, socket.socket]:
    """Connect to the shared engine of a model; start the engine if it does not run.

    Returns the handle and the connection. Blocks while the process starts, but does not wait until the model is
    loaded. Raises OSError if the engine cannot be started.
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
    # The last output may reach the file a moment after the engine has ended.
    time.sleep(0.05)
    try:
        with log.open("rb") as written:
            written.seek(max(0, log.stat().st_size - _LOG_BYTES))
            return written.read()
    except OSError:
        return b""
