"""Start of an engine process, and the handle of a process that is not shared."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Protocol, TypeAlias

from unisono_adapters.mlx.jobs import BatchLimits
from unisono_adapters.mlx.log import Log, meaning

# Seconds to wait for the process to end by itself before it is killed.
_PATIENCE_S = 2.0
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
