"""Write timeout for responses: disconnects a client that stops reading.

Without this timeout, unread output would keep the socket open indefinitely, even during a graceful close. Measured with
a stream that the client does not read: uvicorn still held the connection after 100 s. With a timeout of 60 s, the
connection ended after 74 s, because the check runs four times per timeout.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from unisono.server.lingering_close import LingeringTransport

# Maximum number of unsent bytes that the system buffers for a connection. The default is megabytes, which a backend
# would generate for a client that may have stopped reading.
UNSENT_BYTES: Final = 16 * 1024
# Number of bytes that are buffered in the process before writers have to wait.
WAITING_BYTES: Final = 32 * 1024
# Number of checks of the progress per timeout. A timeout is noticed at most one interval too late.
CHECKS_PER_TIMEOUT: Final = 4


class Delivery:
    """Write timeout of one connection.

    The timeout applies while writers wait because the buffer is full, and while output remains unsent after
    `close` was called. A client that reads nothing for `timeout_s` seconds is disconnected.
    """

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer: TimerHandle | None = None
        self._last_unsent = 0
        self._deadline = 0.0

    def watch(self) -> None:
        if self._timer is None:
            self._restart_timeout(self._unacknowledged())

    def rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _unacknowledged(self) -> int:
        """Return the number of bytes in the buffers of the process and the system.

        The client has not acknowledged these bytes. The system takes bytes from the process in large portions only, so
        the buffer of the process alone does not show that a slow client reads.
        """
        return self._transport.get_write_buffer_size() + unacknowledged(self._transport.get_extra_info("socket"))

    def _restart_timeout(self, unsent: int) -> None:
        """Restart the timeout: the client has read something."""
        self._last_unsent = unsent
        self._deadline = self._loop.time() + self._timeout_s
        self._timer = self._loop.call_later(self._timeout_s / CHECKS_PER_TIMEOUT, self._check)

    def _check(self) -> None:
        self._timer = None
        # All remaining bytes are in the buffer of the system, so no writer waits.
        if not self._transport.get_write_buffer_size():
            return
        unsent = self._unacknowledged()
        if unsent < self._last_unsent:
            self._restart_timeout(unsent)
        elif self._loop.time() >= self._deadline:
            reset(self._transport)
        else:
            self._timer = self._loop.call_later(self._timeout_s / CHECKS_PER_TIMEOUT, self._check)


def reset(transport: Transport) -> None:
    """Close the connection with RST.

    Otherwise, the system would keep trying to send the buffered bytes for up to a quarter of an hour.
    """
    with suppress(OSError, ValueError):
        # uvloop raises ValueError for a socket that is gone, asyncio OSError.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def unacknowledged(connection: socket.socket) -> int:
    """Return the number of sent bytes that the peer has not acknowledged, or 0 if unknown."""
    with suppress(OSError, ValueError):
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return 0


def limit_buffers(transport: Transport) -> None:
    """Limit the buffers of the process and the system for output that the client has not read."""
    transport.set_write_buffer_limits(WAITING_BYTES)
    sock = transport.get_extra_info("socket")
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        # Otherwise the system accepts megabytes for a client that reads slowly, and writers never wait.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


class ChunkWriter:
    """Writer of parts of a chunked body, which bypasses uvicorn's slower `send`."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def is_head_written(self) -> bool:
        # uvicorn's `send` returns without writing once the client has disconnected.
        return self._cycle.response_started

    def is_ready(self) -> bool:
        """Return whether the body is chunked, and a write now would be neither delayed nor lost."""
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected) and bool(cycle.chunked_encoding)

    def join_head(self) -> None:
        """Send the response head, which is written next, together with the first part of the body."""
        if isinstance(transport := self._cycle.transport, LingeringTransport):
            transport.join_next()

    def write(self, body: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def abort(self) -> None:
        # Otherwise, uvicorn would log an error because the response is incomplete.
        self._cycle.disconnected = True
        self._cycle.transport.close()


def chunk_writer(send: Send) -> ChunkWriter | None:
    """Return a writer for the response of `send`; None if uvicorn did not create `send`."""
    cycle = getattr(send, "__self__", None)
    return ChunkWriter(cycle) if isinstance(cycle, RequestResponseCycle) else None


class DisconnectNotifier:
    """Notifier that calls functions of the answering code when the client disconnects."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._watchers: list[Callable[[], None]] = []

    def watch(self, notify: Callable[[], None]) -> Callable[[], None] | None:
        """Call `notify` when the client disconnects; return a function that prevents the call.

        Return None if the request body has not arrived completely. In this case, `notify` is never called, and only a
        reader of the body notices the disconnect.
        """
        if self._cycle.more_body or self._cycle.waiting_for_100_continue:
            return None
        if self._cycle.disconnected:
            return asyncio.get_running_loop().call_soon(notify).cancel
        # A large body pauses reading, and a connection that is not read does not report a disconnect.
        self._cycle.flow.resume_reading()
        self._watchers.append(notify)
        return partial(self._unwatch, notify)

    def report(self) -> None:
        """Call the functions that wait for the disconnect."""
        watchers, self._watchers = self._watchers, []
        for notify in watchers:
            notify()

    def _unwatch(self, notify: Callable[[], None]) -> None:
        if notify in self._watchers:
            self._watchers.remove(notify)


class Delivering:
    """Mixin that applies the write timeout to HTTP connections and WebSockets.

    It must precede uvicorn's protocol class in the list of bases.
    """

    _delivery: Delivery

    def pause_writing(self) -> None:
        super().pause_writing()  # type: ignore[misc]
        self._delivery.watch()

    def resume_writing(self) -> None:
        super().resume_writing()  # type: ignore[misc]
        self._delivery.rest()
