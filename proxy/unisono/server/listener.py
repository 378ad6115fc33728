"""HTTP and WebSocket listener with limits on header time, header size and unread output.

uvicorn lacks these limits, so silent or stalled clients would exhaust the sockets. `connections` adds them to its
protocol class. Upgrades to protocols other than WebSocket are ignored, and the request is answered as plain HTTP. If a
request is refused, earlier requests on its connection that were read completely are answered first. All requests of a
connection end when the client disconnects.

Measured with uvicorn's protocol class and with this class:

- Silence, half a head, or a byte of a head every 0.2 s: uvicorn still held each connection after 40 s. With a deadline
  of 10 s, this class answers 408 after 10.1 s.
- A head of 64 MB: the memory of uvicorn's process grew from 19 to 83 MB. This class refuses it, and memory stays flat.
- A POST with `Upgrade: h2c` and a body of 3 bytes: uvicorn's application received 0 bytes, and here all 3.
- uvicorn's `limit_concurrency` also answered health checks with 503, in plain text, and still opened WebSockets.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio import TimerHandle, Transport
from collections.abc import Collection
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from unisono.api.asgi_layers import HEALTH_PATHS
from unisono.api.body_limits import ARRIVED_BYTES
from unisono.api.disconnects import WATCH_DISCONNECT
from unisono.api.error_responses import Formats
from unisono.core.frozen import dataclass
from unisono.core.log_rate import RateLimitedWarning
from unisono.errors import HeadersTimeout, HeadersTooLarge, MalformedRequest, TooManyConnections, UnisonoError
from unisono.server.lingering_close import HalfClosed, LingeringTransport
from unisono.server.request_head import (
    check_head,
    close_unless_continued,
    end_body_by_closing,
    path_of,
    refusal,
    without_upgrade,
)
from unisono.server.write_timeout import Delivering, Delivery, DisconnectNotifier, limit_buffers

if TYPE_CHECKING:
    from starlette.types import ASGIApp
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from unisono.server.websocket_connection import WebSocketConnection

# Warnings about refused requests, which never reach the request log. Their rate is limited, because a client can send
# any number of such requests.
REFUSED_REQUESTS = RateLimitedWarning(logging.getLogger(__name__))

MAX_HEADER_BYTES = 64 * 1024
WRITE_TIMEOUT_S = 60.0
# Maximum number of requests on a connection that wait for earlier responses. Clients that pipeline send a few dozen.
MAX_PIPELINED = 100
# If one read contains more body chunks, other connections are served before the next read.
CHUNKS_BEFORE_PAUSE = 4096
# Module that is imported for the first WebSocket: most gateways never open one.
WEBSOCKET_MODULE = "unisono.server.websocket_connection"


@dataclass(frozen=True, slots=True)
class ListenerSettings:
    """Settings of a listener; `connections` explains them."""

    header_timeout_s: float
    max_header_bytes: int
    write_timeout_s: float
    max_connections: int
    formats: Formats


def connections(
    header_timeout_s: float,
    max_header_bytes: int = MAX_HEADER_BYTES,
    *,
    write_timeout_s: float = WRITE_TIMEOUT_S,
    max_connections: int = sys.maxsize,
    formats: Formats = MappingProxyType({}),
) -> type[HttpToolsProtocol]:
    """Return a protocol class for uvicorn's `http` setting.

    Headers must be complete within `header_timeout_s` seconds and `max_header_bytes` bytes. The time starts when the
    connection opens, or when the first byte of a further request arrives. Body data that arrives after the response
    must be complete within the same time. The client must read some output every `write_timeout_s` seconds, or it is
    disconnected.

    Requests on more than `max_connections` connections are refused, except for health checks: an orchestrator would
    otherwise restart a busy gateway. `formats` maps paths to the error formats of APIs other than OpenAI's.
    """
    settings = ListenerSettings(header_timeout_s, max_header_bytes, write_timeout_s, max_connections, formats)
    return type("LimitedHttp", (HttpConnection,), {"settings": settings})


def _new_websocket(write_timeout_s: float, formats: Formats, **uvicorn_arguments: Any) -> WebSocketConnection:
    from unisono.server.websocket_connection import WebSocketConnection

    return WebSocketConnection(write_timeout_s, formats, **uvicorn_arguments)


class HttpConnection(Delivering, HttpToolsProtocol):
    """uvicorn's HTTP connection with limits; `connections` creates a subclass with settings."""

    settings: ClassVar[ListenerSettings]

    _deadline: TimerHandle | None = None
    _header_bytes = 0
    # Number of bytes of chunk framing and trailers since the last body data.
    _between_bytes = 0
    # Number of body chunks in the current read.
    _pieces = 0
    _in_headers = True
    # True once at most `max_connections` connections were open, this one included. Its requests are then served.
    _is_admitted = False
    # True while an incomplete request is being read.
    _is_read = False
    _is_upgrade_ignored = False
    # Request that is being answered, or was answered last. uvicorn's attribute `cycle` is the request that was read
    # last.
    _answering: RequestResponseCycle | None = None
    # Response of an error that closes the connection after the pending responses. Further input is ignored.
    _refusal: bytes | None = None
    _half_closed: HalfClosed | None = None
    # Task that imports the WebSocket library and then starts the WebSocket.
    _upgrade: asyncio.Task[None] | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        self._raw_transport = transport
        self._lingering = LingeringTransport(transport, self._has_unread_input)
        super().connection_made(self._lingering)
        limit_buffers(transport)
        self._delivery = Delivery(transport, self.settings.write_timeout_s)
        self._start_deadline()
        self._is_admitted = len(self.connections) <= self.settings.max_connections

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._delivery.rest()
        self._lingering.stop()
        if self._half_closed is not None:
            self._half_closed.stop()
        if self._answering is not None and not self._answering.response_complete:
            # uvicorn notifies only the request that was read last.
            self._answering.disconnected = True
            self._answering.message_event.set()
            self._disconnect.report()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True, which keeps the connection open, if a complete request is still unanswered."""
        if self._lingering.is_closing():
            return False
        self._drop_incomplete()
        cycle = self._current_request()
        if cycle is not None and HalfClosed.can_probe(cycle):
            self._half_closed = HalfClosed(self._raw_transport, cycle)
            return True
        if cycle is None and self._is_read:
            self._refuse(MalformedRequest("The request ended before it was complete."))
        return False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._answering, self._disconnect = cycle, DisconnectNotifier(cycle)
        cycle.scope["state"][WATCH_DISCONNECT] = self._disconnect.watch
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def _current_request(self) -> RequestResponseCycle | None:
        """Return the request that is being answered, if it was read completely; None otherwise."""
        cycle = self._answering
        return None if cycle is None or cycle.response_complete or cycle.more_body else cycle

    def _drop_incomplete(self) -> None:
        """Drop a queued request whose body will never be complete."""
        if self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else cast("RequestResponseCycle", self._answering)

    def on_response_complete(self) -> None:
        # The response to a HEAD request ends after its head, so the head would wait for another write.
        self._lingering.flush()
        super().on_response_complete()
        if self.transport.is_closing():
            self._delivery.watch()
        elif self._current_request() is None and self.cycle.response_complete:
            self._on_all_answered()

    def _on_all_answered(self) -> None:
        if self._refusal is not None:
            self._end(self._refusal)
        elif self._half_closed is not None:
            self._end(b"")
        elif self._is_read and self._deadline is None:
            # The client may send the rest of a body until this deadline, so that it can read the response. The next
            # headers have no deadline while responses are pending.
            self._start_deadline()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._delivery.watch()

    def data_received(self, data: bytes) -> None:
        if self._lingering.is_lingering or self._refusal is not None:
            self._lingering.discard(len(data))
            return
        if self._in_headers:
            if self._deadline is None and self._current_request() is None:
                self._start_deadline()
            self._header_bytes += len(data)
        else:
            self._between_bytes += len(data)
        self._unset_keepalive_if_required()
        self._pieces = 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            # If a callback raises an exception, the parser raises its own, with the original one as its context.
            cause = error.__context__
            self._refuse(
                cause if isinstance(cause, UnisonoError) else MalformedRequest("The request is not valid HTTP.")
            )
        # One read may contain both the end of the headers and part of the body, so only incomplete headers are
        # measured.
        size = self._header_bytes if self._in_headers else self._between_bytes
        if size > self.settings.max_header_bytes and self._refusal is None and not self.transport.is_closing():
            limit = self.settings.max_header_bytes
            self._refuse(HeadersTooLarge(f"The headers are larger than {limit:,} bytes; send fewer or shorter ones."))
        if self._pieces > CHUNKS_BEFORE_PAUSE:
            # Without a pause, uvloop would read from this connection many times in a row.
            self._raw_transport.pause_reading()
            self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not (self.flow.read_paused or self._raw_transport.is_closing()):
            self._raw_transport.resume_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = self._is_read = True

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise MalformedRequest(
                f"More than {MAX_PIPELINED} requests wait for a response on this connection; read responses before "
                "sending more requests."
            )
        version = self.parser.get_http_version()
        method = self.parser.get_method().decode("ascii")
        check_head(method, self.url, version, self.scope, self.settings.max_header_bytes)  # type: ignore[arg-type]
        self._is_upgrade_ignored = self.parser.should_upgrade() and not self._should_upgrade()
        if self._is_upgrade_ignored:
            return
        is_crowded = not self.parser.should_upgrade() and self._is_over_capacity(self.tasks)
        if is_crowded and path_of(self.url) not in HEALTH_PATHS:
            raise self._too_many_connections()
        self._in_headers = False
        self._header_bytes = self._between_bytes = 0
        self._stop_deadline()
        super().on_headers_complete()
        if self.parser.should_upgrade():
            return
        # Trailers arrive after all decisions that depend on the headers, and must not be read as headers.
        self.headers = []
        if is_crowded:
            self.cycle.keep_alive = False
        if self.expect_100_continue:
            close_unless_continued(self.cycle)
        if version == "1.0":
            end_body_by_closing(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._between_bytes = 0
        self._pieces += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_upgrade_ignored:
            self._stop_deadline()
            super().on_message_complete()
            if self.cycle is not None:
                self.cycle.scope["state"][ARRIVED_BYTES] = len(self.cycle.body)
            # A WebSocket handshake is checked once it is complete.
            self._is_read = self.parser.should_upgrade()
        # The next bytes start another request.
        self._in_headers = True

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse a request again without its unsupported upgrade. The parser would drop its body."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._header_bytes = 0
        self.data_received(without_upgrade(method, self.url, version, self.headers) + rest)

    def _is_over_capacity(self, tasks: Collection[object] = ()) -> bool:
        limit = self.settings.max_connections
        self._is_admitted = self._is_admitted or len(self.connections) <= limit
        return not self._is_admitted or len(tasks) >= limit

    def _too_many_connections(self) -> TooManyConnections:
        return TooManyConnections(
            f"This process of the gateway has reached its limit of {self.settings.max_connections:,} connections; "
            "try again later. The operator can raise `unisono.max_connections`."
        )

    def handle_websocket_upgrade(self) -> None:
        if self._current_request() is not None:
            self._refuse(MalformedRequest("A WebSocket cannot start before earlier requests are answered."))
        elif self._is_over_capacity():
            self._refuse(self._too_many_connections())
        elif self.scope["method"] != "GET" or self.scope["http_version"] != "1.1":
            self._refuse(MalformedRequest("A WebSocket must start with a GET request over HTTP/1.1."))
        elif any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.headers
        ):
            self._refuse(MalformedRequest("A WebSocket request must not have a body; omit `Content-Length`."))
        elif WEBSOCKET_MODULE in sys.modules:
            self._start_websocket()
        else:
            self._raw_transport.pause_reading()
            self._upgrade = self.loop.create_task(self._import_and_start_websocket())

    async def _import_and_start_websocket(self) -> None:
        # The import takes tens of milliseconds. In the event loop, it would block all other requests.
        await asyncio.to_thread(import_module, WEBSOCKET_MODULE)
        if not self.transport.is_closing():
            self._raw_transport.resume_reading()
            self._start_websocket()

    def _start_websocket(self) -> None:
        self._delivery.rest()
        self.ws_protocol_class = partial(  # type: ignore[assignment]
            _new_websocket, self.settings.write_timeout_s, self.settings.formats
        )
        self.transport = self._raw_transport
        super().handle_websocket_upgrade()
        taken_over_by = cast("WebSocketConnection", self.transport.get_protocol())
        if not taken_over_by.handshake_initiated:
            # uvicorn has lower header limits for WebSockets, and sends no response if a request exceeds them.
            self._refuse(HeadersTooLarge(taken_over_by.HEADER_LIMITS))

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(self.settings.header_timeout_s, self._overdue)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _overdue(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            # Close without lingering, because everything that the client sent was read.
            self._refuse(HeadersTimeout(f"The headers did not arrive within {self.settings.header_timeout_s:g} s."))
            self._raw_transport.close()

    def _has_unread_input(self) -> bool:
        if self._half_closed is not None:
            return False
        return self._is_read or self._refusal is not None or (self._in_headers and bool(self._header_bytes))

    def _refuse(self, error: UnisonoError) -> None:
        """Refuse the request that is being read, after the responses to earlier requests."""
        # If the response to this request has started, there is no second response.
        is_answered = not self._in_headers and self.cycle is not None and self.cycle.response_started
        self._refusal = (
            b"" if is_answered else refusal(error, self.url if self._is_read else b"", self.settings.formats)
        )
        # Browsers open connections in advance and may never use them.
        if self._refusal and (self._is_read or not isinstance(error, HeadersTimeout)):
            host = self.client[0] if self.client else "unknown"
            REFUSED_REQUESTS.warn(f"A request from {host} was refused with {error.status}: {error}")
        self._drop_incomplete()
        if self._current_request() is None:
            self._end(self._refusal)

    def _end(self, last: bytes) -> None:
        """Write `last` and close the connection."""
        if last:
            self.transport.write(last)
        if self.cycle is not None and not self.cycle.response_complete:
            # Nothing may follow the refusal.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._disconnect.report()
        self.transport.close()
        self._delivery.watch()
