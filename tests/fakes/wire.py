"""Raw HTTP server that performs scripted steps.

No library is involved that could correct deliberately broken output.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

PROBE = "unisono-probe"
TOKENIZERS = ("/tokenize", "/detokenize")
# POST paths that do not generate.
ABOUT_ITSELF = (*TOKENIZERS, "/v1/tokenize", "/v1/detokenize", "/api/show")

# Bytes of a flood per write.
BUCKET = 32 * 1024


@dataclass(frozen=True)
class Write:
    """Bytes to write.

    `framed` bytes are part of the body; a dialect can wrap them in its transfer coding.
    """

    data: bytes
    framed: bool = False


@dataclass(frozen=True)
class Sleep:
    seconds: float


@dataclass(frozen=True)
class Stall:
    """Send nothing more until the client disconnects."""


@dataclass(frozen=True)
class Hold:
    """Send nothing more until the event is set."""

    until: asyncio.Event


@dataclass(frozen=True)
class Flood:
    """Repeat `pieces` up to `total` bytes, as fast as the client reads.

    Pieces are part of the body, like `framed` bytes.
    """

    pieces: tuple[bytes, ...]
    total: int


@dataclass(frozen=True)
class Reset:
    """Break the connection with RST."""


@dataclass(frozen=True)
class Close:
    """Close the connection with FIN."""


Step = Write | Sleep | Stall | Hold | Flood | Reset | Close


@dataclass
class Seen:
    """A received request and its outcome. Times are event loop times."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    at: float
    # Time when the script was finished.
    done_at: float | None = None
    # Time when the client disconnected before that.
    gone_at: float | None = None
    # Flood bytes sent so far.
    poured: int = 0
    _gone: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_probe(self) -> bool:
        """Whether this is a request of the gateway itself and not of a client."""
        marked = self.headers.get("x-request-id", "").startswith(PROBE)
        return marked or self.method != "POST" or self.path in ABOUT_ITSELF


class WireServer:
    """Server whose `respond` returns the steps for each request.

    With `reads_body=False`, it stops reading after the headers of a POST. `requests` holds generations for clients,
    `probes` all other requests. `connections` counts accepted sockets, `open` those still open; `closed_at` has the
    close times of the others. If `respond` raises, the connection is dropped and the error is raised when the server
    exits.
    """

    def __init__(self, respond: Callable[[Seen], Iterable[Step]], *, reads_body: bool = True) -> None:
        self.respond = respond
        self.reads_body = reads_body
        self.requests: list[Seen] = []
        self.probes: list[Seen] = []
        self.connections = 0
        self.closed_at: list[float] = []
        self.failures: list[Exception] = []
        # Limits concurrent generations; others wait before their first byte. None for no limit.
        self.slots: asyncio.Semaphore | None = None
        # Port to listen on; 0 for a free port.
        self.at_port = 0
        # Size of the socket send buffer in bytes; 0 for the system default.
        self.send_buffer = 0
        self._live: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self), "127.0.0.1", self.at_port
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for connection in list(self._live):
            connection.drop()
        await self._server.wait_closed()
        await asyncio.gather(*(c.task for c in list(self._live) if c.task is not None), return_exceptions=True)
        if self.failures and error is None:
            raise self.failures[0]

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def open(self) -> int:
        return len(self._live)

    def break_connections(self) -> None:
        """Send RST on every open connection, including idle ones."""
        for connection in list(self._live):
            connection.reset()

    async def asked(self, count: int = 1, within: float = 5.0) -> None:
        """Wait until `count` requests have arrived."""
        async with asyncio.timeout(within):
            while len(self.requests) < count:
                await asyncio.sleep(0.001)

    async def gone(self, index: int = -1, within: float = 5.0) -> float:
        """Wait for the client disconnect of a request; return its time."""
        seen = self.requests[index]
        async with asyncio.timeout(within):
            await seen._gone.wait()
        assert seen.gone_at is not None
        return seen.gone_at


class _Connection(asyncio.Protocol):
    def __init__(self, server: WireServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport | None = None
        self._current: Seen | None = None
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast without a check, because transports of uvloop are no subclass of those of asyncio.
        self._transport = cast(asyncio.Transport, transport)
        if self._server.send_buffer:
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._server.send_buffer)
        self._server.connections += 1
        self._number = self._server.connections
        self._server._live.add(self)
        self.task = self._loop.create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._arrived.set()
        if not self._server.reads_body and b"\r\n\r\n" in self._buffer and self._buffer.startswith(b"POST"):
            assert self._transport is not None
            self._transport.pause_reading()
            # A disconnect is noticed by reading; a paused server has to poll the socket instead.
            self._loop.create_task(self._notice())

    def connection_lost(self, error: Exception | None) -> None:
        now = self._loop.time()
        self._server.closed_at.append(now)
        self._server._live.discard(self)
        seen = self._current
        if seen is not None and seen.done_at is None:
            seen.gone_at = now
            seen._gone.set()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def reset(self) -> None:
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    async def _notice(self) -> None:
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        # TCP_INFO's first byte is the state; 1 is ESTABLISHED.
        while sock.fileno() != -1 and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\x01":
            await asyncio.sleep(0.005)
        self._transport.abort()

    async def _serve(self) -> None:
        while True:
            seen = await self._request()
            self._current = seen
            (self._server.probes if seen.is_probe else self._server.requests).append(seen)
            try:
                steps = list(self._server.respond(seen))
            except Exception as error:
                self._server.failures.append(error)
                self.drop()
                return
            async with nullcontext() if seen.is_probe or self._server.slots is None else self._server.slots:
                lives_on = await self._perform(steps)
            if not lives_on:
                return
            seen.done_at = self._loop.time()

    async def _request(self) -> Seen:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            await self._more()
        head = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        length = int(headers.get("content-length", 0)) if self._server.reads_body else 0
        while len(self._buffer) < length:
            await self._more()
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        return Seen(method, path, headers, body, self._number, self._loop.time())

    async def _more(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    async def _perform(self, steps: Iterable[Step]) -> bool:
        """Perform the steps; return whether the connection stays open."""
        assert self._transport is not None
        for step in steps:
            match step:
                case Write(data):
                    self._transport.write(data)
                    # Send these bytes in a separate write.
                    await asyncio.sleep(0)
                case Sleep(seconds):
                    await asyncio.sleep(seconds)
                case Stall():
                    await asyncio.Event().wait()
                case Hold(until):
                    await until.wait()
                case Flood(pieces, total):
                    await self._pour(b"".join(pieces), total)
                case Reset():
                    self._finish()
                    self.reset()
                    return False
                case Close():
                    self._finish()
                    self._transport.close()
                    return False
        return True

    async def _pour(self, water: bytes, total: int) -> None:
        assert self._transport is not None
        assert self._current is not None
        while self._current.poured < total:
            for start in range(0, len(water), BUCKET):
                self._transport.write(water[start : start + BUCKET])
                self._current.poured += len(water[start : start + BUCKET])
                # Let other connections run.
                await asyncio.sleep(0)
                await self._writable.wait()

    def _finish(self) -> None:
        assert self._current is not None
        self._current.done_at = self._loop.time()
