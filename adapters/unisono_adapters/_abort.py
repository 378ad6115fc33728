"""Abort of unfinished responses by closing the socket, so that the backend stops generating.

Implemented as aiohttp response classes.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any

import aiohttp


def _drop(transport: asyncio.Transport | None) -> None:
    """Close with RST.

    A graceful close first delivers data that a stalled backend does not read, and a server notices a FIN one
    write late.
    """
    if transport is None or transport.is_closing():
        return
    sock = transport.get_extra_info("socket")
    if sock is not None:
        # For a closed socket uvloop raises ValueError, asyncio OSError.
        with suppress(OSError, ValueError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class Dropping(aiohttp.ClientResponse):
    """Response that drops its socket when it is closed before its end."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        transport = connection.transport
        try:
            return await super().start(connection)
        except BaseException:
            self._close(transport)
            raise

    def close(self) -> None:
        if self.connection is not None:
            self._close(self.connection.transport)
        super().close()

    def _close(self, transport: asyncio.Transport | None) -> None:
        _drop(transport)


class Polite(Dropping):
    """Response that closes its connection with FIN if the head has not arrived, else with RST.

    After FIN, the backend can still send the head, but nothing after the head.
    """

    _answered = False

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        started = await super().start(connection)
        self._answered = True
        return started

    def _close(self, transport: asyncio.Transport | None) -> None:
        if not self._answered and transport is not None and not transport.get_write_buffer_size():
            transport.close()
        else:
            _drop(transport)
