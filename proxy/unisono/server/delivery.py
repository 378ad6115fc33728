"""Delivery of responses: a client that takes nothing of its response for too long loses its connection.

Without this, what is left for it to take would keep its socket open for ever, also behind a polite close.
"""

from __future__ import annotations

import asyncio
import socket
from asyncio import TimerHandle, Transport
from typing import Final

from unisono.server.closing import reset, unacknowledged

# What the system takes of a response before the client does. By default it is megabytes, all of which a backend would
# have generated for somebody who may not read on.
UNSENT_BYTES: Final = 16 * 1024
# What waits for the system to take it before writers have to wait, too.
WAITING_BYTES: Final = 32 * 1024
CHECKS_PER_TIMEOUT: Final = 4


class Delivery:
    """Watches what a connection has not sent yet, whenever there is so much that writers wait, and whenever there is
    something left at its end. A client that takes nothing of it for `timeout_s` seconds loses its connection."""

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer: TimerHandle | None = None
        self._left = 0
        self._due = 0.0

    def watch(self) -> None:
        if self._timer is None:
            self._seen(self._untaken())

    def rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _untaken(self) -> int:
        """Bytes that the client has not acknowledged, in our buffer and in the system's.

        The system takes bytes from our buffer in large portions only, so ours alone hides a client that reads slowly.
        """
        return self._transport.get_write_buffer_size() + unacknowledged(self._transport.get_extra_info("socket"))

    def _seen(self, left: int) -> None:
        """Restart the timeout: the client has read something."""
        self._left = left
        self._due = self._loop.time() + self._timeout_s
        self._timer = self._loop.call_later(self._timeout_s / CHECKS_PER_TIMEOUT, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._transport.get_write_buffer_size():
            return
        left = self._untaken()
        if left < self._left:
            self._seen(left)
        elif self._loop.time() >= self._due:
            reset(self._transport)
        else:
            self._timer = self._loop.call_later(self._timeout_s / CHECKS_PER_TIMEOUT, self._look)


def hold_little(transport: Transport) -> None:
    """Limit the bytes that are sent or buffered and not yet read by the client."""
    transport.set_write_buffer_limits(WAITING_BYTES)
    sock = transport.get_extra_info("socket")
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


class Delivering:
    """Behaviour shared by HTTP connections and WebSockets; stands before the protocol's class."""

    _delivery: Delivery

    def pause_writing(self) -> None:
        super().pause_writing()  # type: ignore[misc]
        self._delivery.watch()

    def resume_writing(self) -> None:
        super().resume_writing()  # type: ignore[misc]
        self._delivery.rest()
