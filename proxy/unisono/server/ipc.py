"""Messages between the supervisor and its workers over a private socket pair.

A message is sent as its length, followed by its pickle. Both processes run the same program. Configurations with
secrets are sent only over this socket. If the socket is closed, the other process has exited. uvicorn sends its workers
only pings, so it cannot send them a configuration.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from typing import TypeAlias

from unisono.config import Config
from unisono.config.environment_and_credentials import MASTER_KEY_VARIABLE
from unisono.core.frozen import dataclass

LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Serve:
    """Message to a worker: serve new requests with this configuration.

    `share` is the number of workers, and `place` the number of this worker, from 0. `reload` is the number of the
    reload that read the configuration, or 0 for the configuration at startup. `address`, `remarks` and `key_variable`
    are for the startup screen.
    """

    config: Config
    share: int
    address: str
    remarks: tuple[str, ...] = ()
    place: int = 0
    reload: int = 0
    key_variable: str = MASTER_KEY_VARIABLE


@dataclass(frozen=True, slots=True)
class Up:
    """Message from a worker that now serves; `screen` are the lines of its startup screen."""

    screen: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """Message from a worker: new requests now use the configuration of `order`."""

    order: Serve


Message: TypeAlias = Serve | Up | Accepted


def to_bytes(message: Message) -> bytes:
    body = pickle.dumps(message)
    return len(body).to_bytes(LENGTH_BYTES) + body


async def next_message(reader: asyncio.StreamReader) -> Message | None:
    """Return the next message, or None if the other end is closed."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
        return _from_bytes(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError):
        return None


def first_message(channel: socket.socket) -> Message | None:
    """Block until the first message arrives. Return None if the other end is closed."""
    length = int.from_bytes(channel.recv(LENGTH_BYTES, socket.MSG_WAITALL))
    body = channel.recv(length, socket.MSG_WAITALL)
    return _from_bytes(body) if body and len(body) == length else None


def _from_bytes(body: bytes) -> Message:
    message: Message = pickle.loads(body)  # noqa: S301 - from this program, over a private socket
    return message
