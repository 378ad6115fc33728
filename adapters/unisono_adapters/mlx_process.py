"""One life of the engine process, seen from the gateway: start it, ask it, notice its death, end it.

The gateway never waits for the process on its event loop, and the process never outlives the gateway: it holds the
read end of a pipe whose write end is here. What it prints is kept in a small buffer and quoted when it dies.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from unisono.core.generation import Generation
from unisono.errors import BackendUnavailable
from unisono_adapters.mlx_jobs import Limits
from unisono_adapters.mlx_wire import (
    LINE_LIMIT,
    Ask,
    Cancel,
    Encoded,
    Failed,
    Output,
    Pulse,
    Ready,
    Refused,
    ToGateway,
    Tokenize,
    WireError,
    from_line,
    to_line,
)

_LOG_BYTES = 8192
_QUOTED_LINES = 3
_QUOTED_CHARACTERS = 500
_PATIENCE_S = 2.0
"""How long the process gets to end by itself."""
_LAST_WORDS_S = 0.5
"""How long the end of the output may take to be read; a grandchild could hold the pipe open for ever."""
_LONGEST_ADDRESS = 100
"""Bytes; what a Unix-domain socket's path may have on every platform, less a little."""

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


@dataclass(slots=True)
class Inbox:
    """What has come for one request and was not taken yet; bounded by the request's own `max_tokens`."""

    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    cached: int | None = None
    refused: Refused | None = None
    encoded: Encoded | None = None


Process: TypeAlias = subprocess.Popen[bytes]


class Engine:
    """A started process with a connection to it. Belongs to one event loop.

    `lost` is None while the process can be asked, and then why it cannot; every inbox is woken when that changes.
    """

    def __init__(
        self, process: Process, folder: Path, log: _Log, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.lost: str | None = None
        self.served = False
        """Whether it has finished a request, which says more than that it started."""
        self._process = process
        self._folder = folder
        self._log = log
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count()
        self._inboxes: dict[int, Inbox] = {}
        self._greeting: asyncio.Future[Ready | Failed] = asyncio.get_running_loop().create_future()
        self._heard_at = time.monotonic()
        self._ending = False
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, model: str, limits: Limits) -> Engine:
        """Start a process and connect. The model loads after that: see `ready`. Raises BackendUnavailable."""
        spawning = asyncio.create_task(asyncio.to_thread(_spawn, model, limits))
        try:
            process, folder, connection = await asyncio.shield(spawning)
        except OSError as error:
            raise BackendUnavailable(f"the engine process cannot be started: {error}") from error
        except asyncio.CancelledError:
            process, folder, connection = await spawning  # a thread cannot be cancelled, and its process must not stay
            connection.close()
            await asyncio.to_thread(_discard, process, folder)
            raise
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=LINE_LIMIT)
        return cls(process, folder, _Log(process), reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> Ready:
        """Wait until the model is loaded. Raises BackendUnavailable when it cannot be."""
        greeting = await asyncio.shield(self._greeting)
        if isinstance(greeting, Failed):
            raise BackendUnavailable(greeting.message)
        return greeting

    def ask(self, job: Generation) -> tuple[int, Inbox]:
        """Begin a generation; `drop` must follow. Raises BackendUnavailable when the engine is lost."""
        number, inbox = self._open()
        self._writer.write(
            to_line(Ask(number, job.prompt.tokens, job.max_tokens, job.sampling, job.cache_salt, job.constraint))
        )
        return number, inbox

    def drop(self, number: int) -> None:
        """The request is over for the gateway; the engine is told unless it is over there too."""
        inbox = self._inboxes.pop(number)
        over = inbox.finish is not None or inbox.refused is not None
        if not over and self.lost is None:
            self._writer.write(to_line(Cancel(number)))

    async def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Ids of `texts` by the model's own tokenizer. Raises BackendUnavailable."""
        number, inbox = self._open()
        try:
            self._writer.write(to_line(Tokenize(number, texts)))
            await inbox.arrived.wait()
            if inbox.encoded is None:
                raise BackendUnavailable(self.lost or "the engine process did not answer")
            return inbox.encoded.ids
        finally:
            del self._inboxes[number]

    def silent_since(self, moment: float) -> float:
        """Seconds without a word from the engine, counted from `moment` (monotonic) at the earliest."""
        return time.monotonic() - max(self._heard_at, moment)

    def kill(self) -> None:
        """End it without asking; `lost` follows."""
        self._process.kill()

    async def stop(self) -> None:
        """End the process and wait for it. Requests that still run are woken. May be called again."""
        self._ending = True
        self._lose("the engine process was shut down")
        self._writer.close()
        await asyncio.to_thread(_discard, self._process, self._folder)
        await self._listening

    def _open(self) -> tuple[int, Inbox]:
        if self.lost is not None:
            raise BackendUnavailable(self.lost)
        number, inbox = next(self._ids), Inbox()
        self._inboxes[number] = inbox
        return number, inbox

    async def _listen(self) -> None:
        trouble = ""
        try:
            while line := await self._reader.readline():
                self._heard_at = time.monotonic()
                self._deliver(from_line(line))
        except (OSError, ValueError, WireError) as error:
            trouble = f"; its connection broke: {error}"
        self._writer.close()
        if self._ending:
            return
        code = await asyncio.to_thread(_discard, self._process, self._folder)
        last_words = await asyncio.to_thread(self._log.last_words)
        self._lose(f"the engine process ended ({_meaning(code)}){trouble}{last_words}")

    def _deliver(self, message: ToGateway | Ask | Cancel | Tokenize) -> None:
        match message:
            case Ready() | Failed():
                if not self._greeting.done():
                    self._greeting.set_result(message)
            case Output(number, tokens, finish, cached):
                if inbox := self._inboxes.get(number):
                    inbox.tokens += tokens
                    inbox.finish = finish
                    inbox.cached = cached if inbox.cached is None else inbox.cached
                    inbox.arrived.set()
                    self.served = self.served or finish is not None
            case Refused(number):
                if inbox := self._inboxes.get(number):
                    inbox.refused = message
                    inbox.arrived.set()
            case Encoded(number):
                if inbox := self._inboxes.get(number):
                    inbox.encoded = message
                    inbox.arrived.set()
            case Pulse():
                pass
            case Ask() | Cancel() | Tokenize():
                raise WireError(f"{type(message).__name__} is not for a gateway")

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
        if not self._greeting.done():
            self._greeting.set_result(Failed(why))
        for inbox in self._inboxes.values():
            inbox.arrived.set()


class _Log:
    """The last of what the process printed. A thread of its own reads it, so that a full pipe never blocks it."""

    def __init__(self, process: Process) -> None:
        self._kept = b""
        self._thread = threading.Thread(target=self._drain, args=(process,), name="mlx-engine-log", daemon=True)
        self._thread.start()

    def last_words(self) -> str:
        """The last lines of a process that has ended, as the tail of a message; empty when it printed nothing."""
        self._thread.join(_LAST_WORDS_S)
        lines = [line.strip() for line in self._kept.decode("utf-8", errors="replace").splitlines() if line.strip()]
        if not lines:
            return ""
        quoted = " / ".join(lines[-_QUOTED_LINES:])[-_QUOTED_CHARACTERS:]
        return "; it last wrote: " + "".join(letter if letter.isprintable() else " " for letter in quoted)

    def _drain(self, process: Process) -> None:
        if process.stdout is None:
            return
        with process.stdout as pipe:
            while piece := os.read(pipe.fileno(), 4096):
                self._kept = (self._kept + piece)[-_LOG_BYTES:]


def _spawn(model: str, limits: Limits) -> tuple[Process, Path, socket.socket]:
    """Start the process with a listening socket to which the returned one is already connected, so that nothing has to
    be waited for and the end of the process is the end of the connection at any moment."""
    folder = _private_folder()
    address = str(folder / "engine.sock")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen(16)
            connection.connect(address)
            connection.setblocking(False)
            process = subprocess.Popen(  # noqa: S603 - our own module, by this interpreter
                _command(model, limits, listener.fileno()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(listener.fileno(),),
                env=_environment(),
                start_new_session=True,
            )
    except BaseException:
        connection.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return process, folder, connection


def _command(model: str, limits: Limits, listener: int) -> list[str]:
    options = {
        "--model": model,
        "--listener": listener,
        "--batch": limits.batch,
        "--waiting": limits.waiting,
        "--prefill-chunk": limits.prefill_chunk,
        "--prefix-cache-bytes": limits.prefix_cache_bytes,
    }
    # -P: the current directory is no place to import from.
    return [sys.executable, "-P", "-m", "unisono_adapters.mlx_engine", *(f"{k}={v}" for k, v in options.items())]


def _private_folder() -> Path:
    """A new folder, mode 0700, with a path short enough for a socket."""
    root = tempfile.gettempdir()
    if len(os.fsencode(root)) > _LONGEST_ADDRESS - len("/unisono-mlx-12345678/engine.sock"):
        root = "/tmp"  # noqa: S108 - the folder made in it is private
    return Path(tempfile.mkdtemp(prefix="unisono-mlx-", dir=root))


def _environment() -> dict[str, str]:
    """What the engine needs and none of the gateway's secrets."""
    passed = {
        name: value
        for name, value in os.environ.items()
        if (name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)) and not name.startswith(_SECRET)
    }
    return passed | _OWN_ENVIRONMENT


def _discard(process: Process, folder: Path) -> int:
    """Let the process end by itself, then make it; blocks. Returns its exit code, negative for a signal."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        code = process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    shutil.rmtree(folder, ignore_errors=True)
    return code


def _meaning(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
