"""The listening end: connections that dawdle, or whose headers never end, are closed.

uvicorn has no deadline for a request's headers and no limit to their size. `connections` makes its protocol class with
both: without them a few thousand silent sockets would hold every place there is. A WebSocket is handed over within the
same bounds, which uvicorn applies to requests only.
"""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from typing import TYPE_CHECKING, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

MAX_HEADER_BYTES = 64 * 1024


def connections(header_timeout_s: float, max_header_bytes: int = MAX_HEADER_BYTES) -> type[HttpToolsProtocol]:
    """A protocol class for uvicorn's `http`. A connection has `header_timeout_s` seconds, and `max_header_bytes`, from
    being opened or from the first byte of a further request until the headers are complete."""

    class Connection(HttpToolsProtocol):
        _deadline: TimerHandle | None = None
        _header_bytes = 0
        _in_headers = True

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start_deadline()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_deadline()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_headers:
                if self._deadline is None:
                    self._start_deadline()
                self._header_bytes += len(data)
            super().data_received(data)
            # The read that completes the headers may hold the body's beginning, so only those still open are judged.
            if self._in_headers and self._header_bytes > max_header_bytes and not self.transport.is_closing():
                self._refuse(b"431 Request Header Fields Too Large")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_headers = True

        def on_headers_complete(self) -> None:
            self._in_headers = False
            self._header_bytes = 0
            self._stop_deadline()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            # The next bytes begin another request, whenever they come.
            self._in_headers = True

        def handle_websocket_upgrade(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                # It came in the middle of another answer on this connection, which would be torn.
                self.transport.close()
            elif self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
                self._refuse(b"503 Service Unavailable")
            elif not self.url.isascii():
                self._refuse(b"400 Bad Request")
            else:
                super().handle_websocket_upgrade()
                taken_over_by = cast("WebSocketsSansIOProtocol", self.transport.get_protocol())
                if not taken_over_by.handshake_initiated:
                    # Its own bounds on headers are narrower, and it stays silent about them.
                    self._refuse(b"431 Request Header Fields Too Large")

        def _start_deadline(self) -> None:
            self._deadline = self.loop.call_later(header_timeout_s, self._overdue)

        def _stop_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _overdue(self) -> None:
            self._deadline = None
            if not self.transport.is_closing():
                self._refuse(b"408 Request Timeout")

        def _refuse(self, status: bytes) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    return Connection
