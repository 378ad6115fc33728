"""Server-sent events: bytes of a stream to a client that may be slow or gone.

The answer's head goes out with the first bytes or with the first keep-alive, whichever comes first, so that a failure
before either is a real HTTP error. After the head a failure ends the stream in the event `data: {"error": {...}}`,
without `data: [DONE]`, which only ever means success. A client that leaves ends the source at once, in every phase,
before the first byte too. Nothing is taken from the source while the client has not taken what was written; one that
takes nothing at all loses its connection (see `server/delivery.py`), and so has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final, Protocol, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from unisono.api.error_responses import outcome, to_body, to_response
from unisono.errors import UnisonoError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_S = 10.0
LINE_SEPARATORS: Final = tuple((c.encode(), b"\\u%04x" % ord(c)) for c in ("\u0085", "\u2028", "\u2029"))

PROBE = "probe_client"
"""Key in the request's state of a function that writes a keep-alive now, which shows whether the client is gone."""

CLIENT_CLOSED_REQUEST = 499
"""The status nobody reads: the client was gone before there was an answer."""


class ClientGone(Exception):
    """The client closed its connection; nobody reads an answer any more."""


class ByteSource(Protocol):
    """Bytes to send, one write per step, each step whole events or nothing (`b""`)."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None:
        """Free whatever feeds the source; called exactly once, also when it was never iterated."""
        ...


def event(body: bytes) -> bytes:
    """One unnamed event. `body` is JSON, so it holds no line break."""
    return b"data: " + body + b"\n\n"


def named_event(name: bytes, body: bytes) -> bytes:
    """One event with a name. `body` is JSON, so it holds no line break."""
    return b"event: " + name + b"\ndata: " + body + b"\n\n"


def without_line_separators(events: bytes) -> bytes:
    """The same events, with U+0085, U+2028 and U+2029 as escapes of JSON: many clients end a line at each of them."""
    # In JSON these characters stand in strings only, where an escape means the same.
    for character, escape in LINE_SEPARATORS:
        if character in events:
            events = events.replace(character, escape)
    return events


def error_event(error: UnisonoError, about: Mapping[str, Any] | None = None) -> bytes:
    """`about` is told beside the error."""
    return event(orjson.dumps({**to_body(error), **(about or {})}))


async def disconnected(receive: Receive) -> None:
    """Return when the client is gone. The request's body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first. Raises ClientGone then."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        await _end(working, gone)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """An answer of server-sent events. `headers` is asked when the head goes out, not before: what it tells may only
    be known by then. `broken` gives the events that a failure behind the head ends in. `keep_alive_s` is in seconds,
    `keep_alive` what is written after so many of silence."""

    media_type = "text/event-stream"

    def __init__(
        self,
        source: ByteSource,
        *,
        headers: Callable[[], Mapping[str, str]] = dict,
        broken: Callable[[UnisonoError], bytes] = error_event,
        keep_alive_s: float = KEEP_ALIVE_S,
        keep_alive: Callable[[], bytes] = lambda: KEEP_ALIVE,
    ) -> None:
        super().__init__()
        self._source = source
        self._more_headers = headers
        self._broken = broken
        self._keep_alive_s = keep_alive_s
        self._keep_alive = keep_alive
        self._lock = asyncio.Lock()
        self._begun = False
        self._last_write = 0.0

    @property
    def begun(self) -> bool:
        """Whether the head is out, perhaps with nothing but a keep-alive behind it: too late for an HTTP error."""
        return self._begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._last_write = asyncio.get_running_loop().time()
        pump = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(disconnected(receive))
        pulse = asyncio.create_task(self._pulse(send))
        probes: list[asyncio.Task[None]] = []

        def probe() -> None:
            # A write in progress shows the same.
            if self._begun and not self._lock.locked():
                probes.append(asyncio.create_task(self._write(send, self._keep_alive())))

        scope.setdefault("state", {})[PROBE] = probe
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not pump.done():
                return
            await _end(pulse, *probes)
            failure = pump.result()
            if failure is None:
                await self._write(send, b"", last=True)
            elif self._begun:
                await self._write(send, self._broken(failure), last=True)
            else:
                await to_response(failure, scope)(scope, receive, send)
        finally:
            scope["state"].pop(PROBE)
            await _end(pump, gone, pulse, *probes)
            await self._source.aclose()

    async def _pump(self, send: Send) -> UnisonoError | None:
        return await outcome(self._drain(send))

    async def _drain(self, send: Send) -> None:
        async for data in self._source:
            if data:
                await self._write(send, data)

    async def _write(self, send: Send, data: bytes, *, last: bool = False) -> None:
        async with self._lock:
            if not self._begun:
                await send(self._head())
                self._begun = True
            self._last_write = asyncio.get_running_loop().time()
            body = without_line_separators(data)
            await send({"type": "http.response.body", "body": body, "more_body": not last})

    def _head(self) -> Message:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self._more_headers(),
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}

    async def _pulse(self, send: Send) -> None:
        """Write something whenever the stream was silent for too long. A write that waits for the client is no
        silence."""
        now = asyncio.get_running_loop().time
        while True:
            silent_s = now() - self._last_write
            if silent_s < self._keep_alive_s:
                await asyncio.sleep(self._keep_alive_s - silent_s)
            elif self._lock.locked():
                await asyncio.sleep(self._keep_alive_s)
            else:
                await self._write(send, self._keep_alive())
