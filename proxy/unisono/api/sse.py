"""Server-sent events for clients that may be slow or disconnected.

The response head is sent with the first event or the first keep-alive. A failure before the head gets an HTTP error
status. A failure after the head ends the stream with the event `data: {"error": {...}}`. `data: [DONE]` is then
omitted, because it signals success.

When the client disconnects, the source is closed at once, even before the first byte. The source is read only when the
client has received the previous write. A client that reads nothing at all loses its connection (see
`server/write_timeout.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from unisono.api.disconnects import until_disconnect
from unisono.api.error_responses import ClientGone, failure_of, to_body, to_response, with_attempts
from unisono.api.json_response import BODY_WRITER, SEND_BODY, BodyWriter, encoded
from unisono.core.events import Event
from unisono.core.tasks import cancel_all
from unisono.engine.request import GenerationStream
from unisono.errors import UnisonoError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_S = 10.0
# Headers of every stream. Without the last one, nginx would buffer the events.
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
LINE_SEPARATORS: Final = tuple((c.encode(), b"\\u%04x" % ord(c)) for c in ("\u0085", "\u2028", "\u2029"))

# Key in the request's state for a function that writes a keep-alive now. The write detects a disconnected client.
PROBE = "probe_client"

# Key in the request's state for a function that returns an iterator of comments, each a whole line of SSE. The comments
# are written between the events, after the head. Before the response ends, the gateway waits at most `LAST_COMMENTS_S`
# seconds for the remaining comments.
COMMENTS = "stream_comments"
LAST_COMMENTS_S = 0.5


class Batches(Protocol[T_co]):
    """Stream of batches, for example batches of the events of a generation."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    async def aclose(self) -> None:
        """Release the stream, even if it was never iterated."""
        ...


class EventSource(Generic[T]):
    """Batches of a stream, and the function that converts each batch to bytes.

    `write` returns whole events, or `b""` if there is nothing to send. It is a function and not a generator of bytes,
    which would cost two calls per token. `end` returns the bytes after the last batch. `connect` is called with the
    EventWriter before the first batch, so that the source can write deltas itself.
    """

    def __init__(
        self,
        batches: Batches[T],
        write: Callable[[T], bytes],
        end: Callable[[], bytes] = lambda: b"",
        connect: Callable[[EventWriter], None] = lambda _: None,
    ) -> None:
        self.batches = batches
        self.write = write
        self.end = end
        self.connect = connect


def generation_source(stream: GenerationStream, write: Callable[[list[Event]], bytes]) -> EventSource[list[Event]]:
    """Return the event source of one generation; `write` converts a batch to bytes."""

    def connect(writer: EventWriter) -> None:
        stream.sink = writer.sink_for(write)

    return EventSource(stream, write, connect=connect)


def event(body: bytes) -> bytes:
    """Return one unnamed event. `body` is JSON, so it contains no line break."""
    return b"data: " + body + b"\n\n"


def named_event(name: bytes, body: bytes) -> bytes:
    """Return one named event. `body` is JSON, so it contains no line break."""
    return b"event: " + name + b"\ndata: " + body + b"\n\n"


def without_line_separators(events: bytes) -> bytes:
    """Escape U+0085, U+2028 and U+2029 as JSON escapes. Many clients end a line at each of them."""
    # In JSON these characters occur only in strings, where an escape means the same.
    for character, escape in LINE_SEPARATORS:
        events = events.replace(character, escape)
    return events


def error_event(error: UnisonoError, about: Mapping[str, Any] | None = None) -> bytes:
    """Return an event in OpenAI's error format. `about` holds additional top-level fields."""
    return event(orjson.dumps({**to_body(error), **(about or {})}))


class EventWriter:
    """Writer of one stream of events.

    Several tasks write events, keep-alives and probes, but only one write is in progress at a time. `head` builds the
    head of the response. It is called when the first bytes are written. Until then, a failure can be an HTTP error.
    """

    def __init__(
        self,
        send: Send,
        send_body: Send,
        head: Callable[[], Message],
        body: BodyWriter | None = None,
    ) -> None:
        self._send = send
        self._send_body = send_body
        self._body = body
        self._head = head
        self.is_writing = False  # a write is in progress, and may wait for the client
        self._waiters: list[asyncio.Future[None]] = []
        self._head_waiter: asyncio.Future[None] | None = None
        self.now = asyncio.get_running_loop().time
        self.is_head_sent = False
        self.is_complete = False  # the last write was made, and nothing may follow
        self.last_write_at = self.now()

    def sink_for(self, to_bytes: Callable[[T], bytes]) -> Callable[[T], bool] | None:
        """Return a function that writes a batch without waiting; None if there is no BodyWriter.

        `to_bytes` converts the batch. The function returns True if it wrote the batch. If it would have to wait, or if
        the client has disconnected, it writes nothing and returns False.
        """
        body = self._body
        if body is None:
            return None

        def take(batch: T) -> bool:
            if self.is_writing or not self.is_head_sent or not body.is_ready():
                return False
            if data := to_bytes(batch):
                try:
                    body.write(data if data.isascii() else without_line_separators(data))
                except OSError:
                    # The caller is the generation, which has not failed. It yields the batch, and `write` raises.
                    return False
                self.last_write_at = self.now()
            return True

        return take

    def write_now(self, data: bytes) -> bool:
        """Write whole events if this is possible without waiting; return whether they were written.

        Raises ClientGone if the client has disconnected.
        """
        body = self._body
        if body is None or self.is_writing or not self.is_head_sent or not body.is_ready():
            return False
        try:
            body.write(data if data.isascii() else without_line_separators(data))
        except OSError:
            raise ClientGone from None
        self.last_write_at = self.now()
        return True

    async def wait_for_head(self) -> None:
        """Wait until the head is sent. Only one task may wait."""
        if not self.is_head_sent:
            self._head_waiter = asyncio.get_running_loop().create_future()
            await self._head_waiter

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Write whole events; the `last` write ends the response.

        Raises ClientGone if the client has disconnected.
        """
        # asyncio's lock would add three calls per write.
        while self.is_writing:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        self.is_writing = True
        try:
            if not self.is_head_sent:
                if self._body is not None:
                    self._body.join_head()
                await self._send(self._head())
                self.is_head_sent = True
                if self._head_waiter is not None and not self._head_waiter.done():
                    self._head_waiter.set_result(None)
            self.last_write_at = self.now()
            body = data if data.isascii() else without_line_separators(data)
            await self._send_body({"type": "http.response.body", "body": body, "more_body": not last})
            self.is_complete = last
        except OSError:  # raised by a server for a client that has disconnected
            raise ClientGone from None
        finally:
            self.is_writing = False
            # All waiting tasks are woken, because a single one may be cancelled at the same moment.
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters.clear()


class KeepAlives:
    """Writer of keep-alives for a stream, on request and after `interval_s` s without output.

    `content` returns the bytes of one keep-alive. No keep-alive is written while another write waits for the client.
    """

    def __init__(self, writer: EventWriter, content: Callable[[], bytes], interval_s: float) -> None:
        self._writer = writer
        self._content = content
        self._interval_s = interval_s
        self._writes: list[asyncio.Task[None]] = []
        self._call_later = asyncio.get_running_loop().call_later
        self._timer = self._call_later(interval_s, self._on_timer)

    def probe(self) -> None:
        """Write a keep-alive now, to detect whether the client has disconnected.

        Does nothing before the head is sent. Does nothing during another write either, because that write detects the
        disconnect too.
        """
        writer = self._writer
        if writer.is_head_sent and not (writer.is_writing or writer.is_complete):
            self._write()

    async def stop(self) -> None:
        """End all keep-alives. May be called more than once."""
        self._timer.cancel()
        if self._writes:
            await cancel_all(*self._writes)

    def _on_timer(self) -> None:
        silent_s = self._writer.now() - self._writer.last_write_at
        is_silent = silent_s >= self._interval_s
        if is_silent and not (self._writer.is_writing or self._writer.is_complete):
            self._write()
        self._timer = self._call_later(self._interval_s - (0.0 if is_silent else silent_s), self._on_timer)

    def _write(self) -> None:
        # Failed writes stay in the list, so that `stop` retrieves their errors.
        self._writes = [task for task in self._writes if not task.done() or task.exception() is not None]
        self._writes.append(asyncio.create_task(self._writer.write(self._content())))


class EventStream(Response):
    """Response of server-sent events.

    `headers` returns additional headers. It is called when the head is sent, because the values may not be known
    earlier. `broken` returns the last events of a stream that fails after the head was sent. After `keep_alive_s`
    seconds without output, the bytes that `keep_alive` returns are written.
    """

    def __init__(
        self,
        source: EventSource[Any],
        *,
        headers: Callable[[], Mapping[str, str]] = dict,
        broken: Callable[[UnisonoError], bytes] = error_event,
        keep_alive_s: float = KEEP_ALIVE_S,
        keep_alive: Callable[[], bytes] = lambda: KEEP_ALIVE,
    ) -> None:
        super().__init__()
        self._source = source
        self._more_headers = headers
        self._failure_events = broken
        self._keep_alive_s = keep_alive_s
        self._keep_alive = keep_alive
        self._writer: EventWriter | None = None

    @property
    def is_head_sent(self) -> bool:
        """True if the head has been sent, so that an HTTP error is no longer possible."""
        return self._writer is not None and self._writer.is_head_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        writer = self._writer = EventWriter(
            send, state.get(SEND_BODY, send), partial(_head, self._more_headers), state.get(BODY_WRITER)
        )
        request = Request(scope, receive)
        comments = [asyncio.create_task(_write_comments(writer, state[COMMENTS]))] if COMMENTS in state else []
        keep_alives = KeepAlives(writer, self._keep_alive, self._keep_alive_s)
        state[PROBE] = keep_alives.probe
        try:
            failure = await until_disconnect(request, self._drain(writer, can_end=not comments))
            if comments and writer.is_head_sent:
                await until_disconnect(request, _wait_for_all(comments, LAST_COMMENTS_S))
            await cancel_all(*comments)
            # Nothing may be written after the last event.
            await keep_alives.stop()
            if writer.is_complete:
                return
            if failure is None:
                await writer.write(b"", last=True)
            # The status 200 is sent, so the failure can only be an event.
            elif writer.is_head_sent:
                await writer.write(self._failure_events(with_attempts(failure, state.get("caller"))), last=True)
            else:
                await to_response(failure, scope)(scope, receive, send)
        except ClientGone:
            return
        finally:
            state.pop(PROBE)
            await cancel_all(*comments)
            await keep_alives.stop()
            # The source holds slots on backends, so it is closed on every path.
            await self._source.batches.aclose()

    async def _drain(self, writer: EventWriter, *, can_end: bool) -> UnisonoError | None:
        """Write all events; return the client-visible error, or None if there is no failure.

        With `can_end`, the write of the last events also ends the response, which saves a system call. Raises
        ClientGone if the client disconnects.
        """
        write = self._source.write
        self._source.connect(writer)
        try:
            async for batch in self._source.batches:
                if not (data := write(batch)):
                    continue
                # Nothing follows DONE.
                is_last = can_end and data.endswith(DONE)
                if is_last or not writer.write_now(data):
                    await writer.write(data, last=is_last)
            if not writer.is_complete and (data := self._source.end()):
                await writer.write(data, last=can_end)
        except ClientGone:
            raise
        except Exception as error:
            return failure_of(error)
        return None

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        # `_head` returns all headers.
        self.raw_headers = []


def _head(more_headers: Callable[[], Mapping[str, str]]) -> Message:
    """Return the head of a stream."""
    # A method would create a reference cycle: the writer would refer to the response, whose source may refer to the
    # writer.
    return {"type": "http.response.start", "status": 200, "headers": [*HEADERS, *encoded(more_headers())]}


async def _wait_for_all(tasks: Collection[asyncio.Task[None]], within_s: float) -> None:
    """Wait until the tasks have ended, but no longer than `within_s` seconds."""
    await asyncio.wait(tasks, timeout=within_s)


async def _write_comments(writer: EventWriter, comments: Callable[[], AsyncIterator[bytes]]) -> None:
    # Until the head is sent, a failure can be an HTTP error.
    await writer.wait_for_head()
    async for comment in comments():
        await writer.write(comment)
