"""HTTP/1.1 client connection to a server: an asyncio protocol that parses with httptools.

The connection passes the bytes of a response body to its `HttpResponse`.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import httptools

from unisono.net.connection_faults import (
    ClosedBeforeResponse,
    ConnectionLost,
    InvalidResponse,
    NotSent,
    ResponseCutShort,
)
from unisono.net.http_response import HttpResponse


def has_input(transport: asyncio.Transport) -> bool:
    """Return whether the socket has unread input: data, the end of the input, or an error."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


def reset(transport: asyncio.Transport) -> None:
    """Close with RST, without waiting for data that the server does not read."""
    if (sock := transport.get_extra_info("socket")) is not None:
        # For a closed socket uvloop raises ValueError, asyncio OSError.
        with suppress(OSError, ValueError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


# Maximum size of a network read, with HTTP framing, that is passed to a waiting reader directly. A longer read is
# buffered.
MAX_DIRECT_BYTES = 8 * 1024
# Maximum number of bytes that may arrive without a part of the body: a response head, a chunk extension or trailers.
MAX_HEAD_BYTES = 64 * 1024
# Size of a socket's receive buffer. By default, the system lets it grow to tens of megabytes.
RECEIVE_BUFFER_BYTES = 32 * 1024


class HttpClientConnection(asyncio.Protocol):
    """Connection that sends one request at a time and parses the response.

    `on_idle` is called when the connection can send the next request, and `on_closed` when it is closed. With `polite`,
    the connection is closed with FIN, not RST, if a request is aborted before the response head arrives. Some servers
    would otherwise never stop processing the request.
    """

    def __init__(
        self,
        on_idle: Callable[[HttpClientConnection], None],
        on_closed: Callable[[HttpClientConnection], None],
        *,
        polite: bool = False,
    ) -> None:
        self._on_idle = on_idle
        self._on_closed = on_closed
        self._polite = polite
        self._transport: asyncio.Transport | None = None
        self._response: HttpResponse | None = None
        # Parts of the body in one network read. The parser calls `on_body` for each HTTP chunk.
        self._body_parts: list[bytes] = []
        self.on_body = self._body_parts.append
        self._parser = httptools.HttpResponseParser(self)
        # Some servers end lines with LF alone, put spaces into headers, or send a space after the size of a chunk.
        # aiohttp and curl accept this too.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        self._ends_at_close = False  # True if only the end of the connection ends the body
        self._bytes_without_body = 0  # bytes received since the last read that contained a part of the body
        self._is_reusable = True
        self.idle_since = 0.0  # by the clock of the event loop

    @property
    def is_idle(self) -> bool:
        """Return whether another request can be sent."""
        transport = self._transport
        if self._response is not None or not self._is_reusable or transport is None or transport.is_closing():
            return False
        # A server may respond before it has read the whole request.
        return not transport.get_write_buffer_size()

    @property
    def has_input(self) -> bool:
        """Return whether the socket has input (data or the end) that the event loop has not read."""
        return self._transport is not None and has_input(self._transport)

    def send(self, head: bytes, body: bytes) -> HttpResponse:
        """Send a request and return its response, whose head has not arrived yet."""
        response = self._response = HttpResponse(self)
        self._is_reusable = False
        self._ends_at_close = False
        self._bytes_without_body = 0
        assert self._transport is not None
        if self._transport.is_closing():
            response.fail(NotSent("the connection was closed before the request"))
        elif body:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head)
        return response

    def resume_reading(self) -> None:
        """Read from the socket again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def release(self, response: HttpResponse) -> None:
        """Detach `response` from the connection.

        The connection becomes idle, or is aborted if the response is incomplete.
        """
        if response is not self._response:
            return
        self._response = None
        if not response.is_complete:
            self._abort(has_head=response.status > 0)
        elif self.is_idle:
            self.idle_since = asyncio.get_running_loop().time()
            self.resume_reading()
            self._on_idle(self)
        else:
            self._close_or_reset()

    def close(self) -> None:
        """Close the connection. The reader of an open response fails."""
        if self._response is not None:
            self._response.close()
        self._close_or_reset()

    def _close_or_reset(self) -> None:
        self._is_reusable = False
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size():
            # A graceful close would wait until the server has read the rest of the request, which may never happen.
            reset(transport)
        else:
            transport.close()

    def _abort(self, *, has_head: bool) -> None:
        """Close the connection so that the server stops generating."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._polite and not has_head and not transport.get_write_buffer_size():
            # A FIN is enough here: the server can send the response head, but its next write fails.
            transport.close()
            return
        # After a FIN, the server would notice the close only at its next write.
        reset(transport)

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        # When the server closes, uvloop's TLS transport loses the bytes that it still buffers. These limits keep its
        # buffer empty.
        if (set_limits := getattr(transport, "set_read_buffer_limits", None)) is not None:
            set_limits(high=1, low=0)

    def eof_received(self) -> None:
        if self._transport is not None and self._transport.get_write_buffer_size():
            # Otherwise the transport closes only after the server has read the whole request.
            reset(self._transport)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None or response.is_finished:
            # No bytes are expected. The next request could mistake them for its response.
            self._close_or_reset()
            return
        response.has_data = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # Bytes after a complete response do not invalidate it.
            self._is_reusable = False
            self._deliver_body(response)
            response.fail(InvalidResponse(str(error)))
            return
        if parts := self._body_parts:
            # If a reader waits for the bytes, they need not be buffered.
            if response.is_waiting and response.consume is not None and len(data) <= MAX_DIRECT_BYTES:
                self._bytes_without_body, read = 0, b"".join(parts)
                parts.clear()
                response.give(read, response.consume)
                return
            self._deliver_body(response)
        else:
            self._bytes_without_body += len(data)
            if self._bytes_without_body > MAX_HEAD_BYTES and not response.is_complete:
                response.fail(InvalidResponse("more than 64 KiB of response head, chunk extensions or trailers"))
                return
        response.wake()

    def _deliver_body(self, response: HttpResponse) -> None:
        """Move the parts of the body to the response; pause reading if its buffer is too full."""
        parts, self._bytes_without_body = self._body_parts, 0
        # Bytes that arrive after the end of the response are dropped.
        if parts and not response.is_complete and response.add_body(parts):
            assert self._transport is not None
            self._transport.pause_reading()
        parts.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_reusable = False
        self._on_closed(self)
        response = self._response
        if response is None or response.is_complete:
            return
        if not response.status:
            response.fail(
                ClosedBeforeResponse("closed before a response")
                if exc is None
                else ConnectionLost("the connection broke")
            )
        elif self._ends_at_close and exc is None:
            response.complete()
            response.wake()
        else:
            response.fail(ResponseCutShort("the connection ended inside the response body"))

    # -- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        response = self._response
        # `status` is set when the head is complete. Header fields after that are trailers, which are ignored.
        if response is not None and not response.status:
            # The parser accepts a space before the colon.
            response.headers[name.decode("latin-1").rstrip().lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        response = self._response
        status = self._parser.get_status_code()
        if response is None or response.is_complete:
            return
        if status < 100:
            raise ValueError("invalid status")  # httptools reports it as an HttpParserError
        if status < 200:
            # Another head follows an interim response.
            response.headers.clear()
            return
        encoding = response.headers.get("transfer-encoding", "").lower()
        is_chunked = encoding.rpartition(",")[2].strip() == "chunked"
        self._ends_at_close = not is_chunked and "content-length" not in response.headers
        response.status = status

    def on_message_begin(self) -> None:
        # The server sent a second response without a request.
        if self._response is not None and self._response.is_complete:
            self._is_reusable = False

    def on_message_complete(self) -> None:
        response = self._response
        if response is not None and response.status and not response.is_complete:
            self._deliver_body(response)
            response.complete()
            self._is_reusable = self._parser.should_keep_alive()
