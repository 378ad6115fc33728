"""HTTP client connection that passes on the bytes of each socket read.

A general client needs more CPU per chunk than the relay under test. With this one, a single process can drive a gateway
to its limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools


class ConnectionLostError(Exception):
    """The server closed the connection before the end of an answer."""


class ClientConnection(asyncio.Protocol):
    """One HTTP/1.1 connection, with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._bodies: list[bytes] = []
        self._sink: Callable[[bytes], None] = self._bodies.append
        self._done: asyncio.Future[int] | None = None
        self._complete = False
        self._keeps_alive = False
        # True if the last answer was complete and the server keeps the connection open.
        self.reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transports of uvloop are no subclasses of those of asyncio.
        self._transport = cast("asyncio.Transport", transport)

    async def request(self, message: bytes, sink: Callable[[bytes], None]) -> int:
        """Send `message`, pass body bytes to `sink` after each read, return the status.

        Raises ConnectionLostError.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionLostError("the connection is closed")
        self._parser = httptools.HttpResponseParser(self)
        self._sink, self._complete, self.reusable = sink, False, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        return await self._done

    def data_received(self, data: bytes) -> None:
        parser, done = self._parser, self._done
        if parser is None or done is None or done.done():
            return
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:
            done.set_exception(ConnectionLostError(f"the answer is not valid HTTP: {error}"))
            return
        if self._bodies:
            self._sink(b"".join(self._bodies))
            self._bodies.clear()
        if self._complete and not done.done():
            self.reusable = self._keeps_alive
            done.set_result(parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        self._bodies.append(body)

    def on_message_complete(self) -> None:
        self._complete = True
        # The parser forgets it afterwards.
        self._keeps_alive = self._parser is not None and self._parser.should_keep_alive()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionLostError("the server closed the connection"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def connect(port: int) -> ClientConnection:
    _, connection = await asyncio.get_running_loop().create_connection(ClientConnection, "127.0.0.1", port)
    return connection


async def request_once(port: int, request: bytes, sink: Callable[[bytes], None]) -> int:
    """Send one request on a new connection and return the status.

    Raises ConnectionLostError and OSError.
    """
    connection = await connect(port)
    try:
        return await connection.request(request, sink)
    finally:
        connection.close()


def message(path: str, body: bytes, method: str = "POST", key: str = "") -> bytes:
    """Return the bytes of one request, with `key` as bearer token if there is one."""
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    if key:
        head += f"authorization: Bearer {key}\r\n"
    return f"{head}accept: */*\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
