"""What the supervisor and its workers say to each other, over a socket that only they hold.

A message is its length and its pickle: both ends are this very program, and a configuration with its secrets travels
over no other way. The end of the socket is the end of the other process, however it came.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from dataclasses import dataclass
from typing import TypeAlias

from unisono.config import Config

LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Serve:
    """To a new worker: the configuration it serves, one of `share` workers, at its `place` among them. `address` and
    `remarks` are for the screen."""

    config: Config
    share: int
    address: str
    remarks: tuple[str, ...] = ()
    place: int = 0


@dataclass(frozen=True, slots=True)
class Reload:
    """To a worker: serve what comes from now on by this configuration."""

    config: Config


@dataclass(frozen=True, slots=True)
class Up:
    """From a worker: it serves. `screen` is what an operator reads about it."""

    screen: tuple[str, ...]


Message: TypeAlias = Serve | Reload | Up


def to_bytes(message: Message) -> bytes:
    body = pickle.dumps(message)
    return len(body).to_bytes(LENGTH_BYTES) + body


async def next_message(reader: asyncio.StreamReader) -> Message | None:
    """None when the other end is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
        return _read(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError):
        return None


def first_message(channel: socket.socket) -> Message | None:
    """Waits for it; None when the other end is gone."""
    with channel.makefile("rb", buffering=0) as pipe:
        head = pipe.read(LENGTH_BYTES)
        length = int.from_bytes(head or b"")
        body = b""
        while len(body) < length and (piece := pipe.read(length - len(body))):
            body += piece
        return _read(body) if body and len(body) == length else None


def _read(body: bytes) -> Message:
    message: Message = pickle.loads(body)  # noqa: S301 - from this program, by a socket nobody else has
    return message
