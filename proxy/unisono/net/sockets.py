"""Operations on the sockets below transports of asyncio and uvloop."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from contextlib import suppress


def has_input(transport: asyncio.Transport) -> bool:
    """Return whether the socket has data, its end or an error that was not read yet."""
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
