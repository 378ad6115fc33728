"""Start of an engine process, for one worker or for all, and the last lines of its output.

The first worker starts the shared process. The workers find its socket in a private folder. A lock on a file ensures
that concurrent workers start only one engine. The lock is released even if the worker that holds it crashes. The engine
does not depend on the worker that started it: it exits by itself shortly after its last connection closes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeAlias

from unisono_adapters.mlx.wire import BatchLimits

# Number of bytes at the end of the output that are kept for error messages.
_LOG_BYTES = 8192
_QUOTED_LINES = 3
_QUOTED_CHARACTERS = 500
# Maximum seconds to wait for the end of the output. A child of the engine process could keep the pipe open.
_LAST_WORDS_S = 0.5


class Log:
    """Tail of a process's output.

    A thread reads the output, so that a full pipe never blocks the process.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._tail = b""
        self._thread = threading.Thread(target=self._drain, args=(process,), name="mlx-engine-log", daemon=True)
        self._thread.start()

    def last_lines(self) -> str:
        """Return the last output of an ended process, to append to an error message.

        Returns an empty string if there was no output.
        """
        self._thread.join(_LAST_WORDS_S)
        return quoted(self._tail)

    def _drain(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdout is None:
            return
        with process.stdout as pipe:
            while piece := os.read(pipe.fileno(), 4096):
                self._tail = (self._tail + piece)[-_LOG_BYTES:]


def quoted(log: bytes) -> str:
    """Return the last lines of `log`, to append to an error message; empty if `log` is blank."""
    lines = [line.strip() for line in log.decode("utf-8", errors="replace").splitlines() if line.strip()]
    if not lines:
        return ""
    last = " / ".join(lines[-_QUOTED_LINES:])[-_QUOTED_CHARACTERS:]
    return "; its last output: " + "".join(letter if letter.isprintable() else " " for letter in last)


def meaning(code: int) -> str:
    """Describe an exit code in parentheses.

    A negative code is the number of the signal that ended the process.
    """
    if code >= 0:
        return f" (exit code {code})"
    try:
        return f" (killed by {signal.Signals(-code).name})"
    except ValueError:
        return f" (killed by signal {-code})"


# Seconds to wait for the process to end by itself before it is killed.
_PATIENCE_S = 2.0
# Seconds to wait for the end of a process whose connection broke.
_CLOSED_S = 0.5
# Maximum length of a socket path in bytes, slightly below every platform's limit.
_LONGEST_ADDRESS = 100

_PASSED_ON = ("PATH", "HOME", "USER", "TMPDIR", "LANG", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
_PASSED_ON_PREFIXES = ("LC_", "XDG_", "HF_", "MLX_", "METAL_", "OMP_", "OPENBLAS_")
_OWN_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
_SECRET = "HF_TOKEN"  # noqa: S105 - the variable's name; nothing is downloaded, so the engine has no use for it


Process: TypeAlias = subprocess.Popen[bytes]


class ProcessHandle(Protocol):
    """Handle of a process. Its methods may block, so async callers run them in a thread."""

    pid: int

    def kill(self) -> None:
        """Kill the process."""
        ...

    def leave(self) -> None:
        """Release the process. It ends if only this gateway uses it; a shared process keeps running."""
        ...

    def ended(self) -> tuple[str, str]:
        """After the connection has broken, return how the process ended, and its last output.

        Both texts are for an error message, and either may be empty.
        """
        ...


class _Owned:
    """Handle of a process that serves only this gateway, and ends when the gateway ends."""

    def __init__(self, process: Process, folder: Path) -> None:
        self.pid = process.pid
        self._process = process
        self._folder = folder
        self._log = Log(process)

    def kill(self) -> None:
        self._process.kill()

    def leave(self) -> None:
        _discard(self._process, self._folder)

    def ended(self) -> tuple[str, str]:
        return meaning(_discard(self._process, self._folder)), self._log.last_lines()


def start_own(model: str, limits: BatchLimits) -> tuple[ProcessHandle, socket.socket]:
    """Start an engine process for this gateway alone; return its handle and a connection to it.

    The gateway opens the listening socket, connects to it, and then passes the socket to the process. So the gateway
    need not wait until the process listens. The connection closes when the process ends.
    """
    folder = _private_folder()
    try:
        process, connection = spawned(folder / "engine.sock", model, limits, stdin=subprocess.PIPE)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return _Owned(process, folder), connection


def spawned(
    address: Path, model: str, limits: BatchLimits, *, stdin: int, stdout: int = subprocess.PIPE, shared: bool = False
) -> tuple[Process, socket.socket]:
    """Start an engine process that listens on the Unix socket `address`, and connect to it.

    `stdin` and `stdout` are passed to `subprocess.Popen`. If `shared` is True, the process runs as long as a gateway is
    connected. Raises OSError if the socket or the process cannot be created.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(address))
            listener.listen(64)
            connection.connect(str(address))
            connection.setblocking(False)
            process = subprocess.Popen(  # noqa: S603 - our own module, by this interpreter
                [*_command(model, limits, listener.fileno()), *(["--shared"] if shared else [])],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                pass_fds=(listener.fileno(),),
                env=_environment(),
                start_new_session=True,
            )
    except BaseException:
        connection.close()
        raise
    return process, connection


def _command(model: str, limits: BatchLimits, listener: int) -> list[str]:
    options = {
        "--model": model,
        "--listener": listener,
        "--batch": limits.batch,
        "--waiting": limits.waiting,
        "--prefill-chunk": limits.prefill_chunk,
        "--prefix-cache-bytes": limits.prefix_cache_bytes,
    }
    # -P: do not import from the current directory.
    return [sys.executable, "-P", "-m", "unisono_adapters.mlx.engine", *(f"{k}={v}" for k, v in options.items())]


def _private_folder() -> Path:
    """Create a folder with mode 0700 whose path is short enough for a Unix socket in it."""
    root = tempfile.gettempdir()
    if len(os.fsencode(root)) > _LONGEST_ADDRESS - len("/unisono-mlx-12345678/engine.sock"):
        root = "/tmp"  # noqa: S108 - the folder made in it is private
    return Path(tempfile.mkdtemp(prefix="unisono-mlx-", dir=root))


def _environment() -> dict[str, str]:
    """Return the environment variables for the engine process, without the gateway's secrets."""
    passed = {
        name: value
        for name, value in os.environ.items()
        if (name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)) and not name.startswith(_SECRET)
    }
    return passed | _OWN_ENVIRONMENT


def _discard(process: Process, folder: Path) -> int:
    """End the process, wait for its end, and remove `folder`. Blocks.

    Closing the standard input of the process makes it end. If it still runs after `_PATIENCE_S` seconds, it is
    killed. Returns the exit code; a negative code is the number of the signal that ended the process.
    """
    if process.stdin is not None:
        process.stdin.close()
    try:
        code = process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    shutil.rmtree(folder, ignore_errors=True)
    return code


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
