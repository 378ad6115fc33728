"""Pool of the HTTP connections to one server: a backend or a tool server.

The pool does not limit the number of connections. The gateway limits concurrent requests elsewhere, where its metrics
show the requests that wait.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio import Future
from collections.abc import AsyncIterator, Sequence
from functools import cache

from aiohappyeyeballs import AddrInfoType, start_connection
from yarl import URL

from unisono.net.connection_faults import (
    ClosedBeforeResponse,
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    PoolClosed,
)
from unisono.net.http_connection import RECEIVE_BUFFER_BYTES, HttpClientConnection
from unisono.net.http_response import HttpResponse


class UploadConnection(HttpClientConnection):
    """Connection for a large body, which is sent only as fast as the server reads.

    A server may respond before it has read the whole body, for example with status 413. The rest of the body is then
    not sent, and the connection is not used again.
    """

    _is_write_paused = False
    _is_cut = False  # True if the body was not sent completely
    _writer: Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        return not self._is_cut and super().is_idle

    async def send_pieces(self, head: bytes, pieces: AsyncIterator[bytes]) -> HttpResponse:
        """Send a request and return its response, whose head may not have arrived yet."""
        response = self.send(head, b"")
        assert self._transport is not None
        self._is_cut = True
        async for piece in pieces:
            while self._is_write_paused and not (response.has_data or response.is_finished):
                self._writer = asyncio.get_running_loop().create_future()
                await self._writer
            if response.has_data or response.is_finished:
                return response
            self._transport.write(piece)
        self._is_cut = False
        return response

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._wake_writer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wake_writer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wake_writer()

    def _wake_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None and not writer.done():
            writer.set_result(None)


KEEP_ALIVE_S = 4.0  # lifetime of idle connections, below uvicorn's default of 5 s
DNS_CACHE_S = 10.0  # lifetime of a DNS lookup
HAPPY_EYEBALLS_DELAY_S = 0.25  # delay before the next address of a host is tried in parallel


class ConnectionPool:
    """Reusable HTTP connections to the host of `url`.

    With `polite`, a request that is aborted before the response head closes its connection with FIN, not RST; see
    `HttpClientConnection`. Only the addresses in `checked` are dialled; if `checked` is empty, the host is looked up.
    `tls` is the TLS context for the server; None for the default context.
    """

    def __init__(
        self, url: URL, *, polite: bool = False, checked: Sequence[str] = (), tls: ssl.SSLContext | None = None
    ) -> None:
        self._url = url
        self._polite = polite
        self._checked = checked
        self._tls = tls
        self._open: set[HttpClientConnection] = set()
        self._idle: list[HttpClientConnection] = []  # most recently used last
        self._timer: asyncio.TimerHandle | None = None
        self._lookup: asyncio.Task[Sequence[AddrInfoType]] | None = None
        self._lookup_expires_at = 0.0  # by the clock of the event loop
        self._is_closed = False

    async def send(self, head: bytes, body: bytes, connect_s: float) -> HttpResponse:
        """Send a request and return the response once its head has arrived.

        The caller must close the response. If a reused connection fails before the first byte of the response, the
        request is sent once more, on a new connection. Raises ConnectionFault if no response head arrives.
        """
        if (connection := self._pop_idle()) is not None:
            response = connection.send(head, body)
            try:
                return await response.with_head()
            except (ClosedBeforeResponse, ConnectionLost):
                if response.has_data:
                    raise
        connection = await self._connect(connect_s)
        return await connection.send(head, body).with_head()

    async def connection(self, connect_s: float) -> HttpClientConnection:
        """Return an idle or new connection, for a request that must not be sent twice.

        The caller must send the request before it awaits anything else. Raises ConnectionFault if no connection can be
        opened.
        """
        while (connection := self._pop_idle()) is not None and connection.has_input:
            # The server has closed the connection. The request would fail, and it would be unknown whether the server
            # ran it.
            connection.close()
        return connection or await self._connect(connect_s)

    async def send_upload(self, head: bytes, pieces: AsyncIterator[bytes], connect_s: float) -> HttpResponse:
        """Send a large request on a new connection; return the response when its head has arrived.

        The caller must close the response. Raises ConnectionFault like `send`.
        """
        connection = await self._connect(connect_s, UploadConnection)
        assert isinstance(connection, UploadConnection)
        try:
            response = await connection.send_pieces(head, pieces)
            return await response.with_head()
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Close all connections; the readers of open responses fail. Repeatable."""
        self._is_closed = True
        self._idle.clear()
        for connection in [*self._open]:
            connection.close()
        for pending in (self._timer, self._lookup):
            if pending is not None:
                pending.cancel()

    def _pop_idle(self) -> HttpClientConnection | None:
        oldest = asyncio.get_running_loop().time() - KEEP_ALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_idle and connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    def _check_open(self) -> None:
        if self._is_closed:
            raise PoolClosed("the connection pool is closed")

    async def _connect(
        self, connect_s: float, kind: type[HttpClientConnection] = HttpClientConnection
    ) -> HttpClientConnection:
        self._check_open()
        try:
            async with asyncio.timeout(connect_s):
                connection = await self._new_connection(kind)
        except TimeoutError as error:
            raise ConnectTimeout(f"no connection within {connect_s:.3g} s") from error
        # ValueError: a host name that cannot be encoded. RuntimeError: the event loop still uses the file descriptor.
        except (OSError, ValueError, RuntimeError) as error:
            raise ConnectFailed(str(error)) from error
        self._open.add(connection)
        if self._is_closed:  # while connecting
            connection.close()
        self._check_open()
        return connection

    async def _new_connection(self, kind: type[HttpClientConnection]) -> HttpClientConnection:
        loop = asyncio.get_running_loop()
        # The context is loaded before the connection is opened, so that a cancellation here leaves nothing open.
        context = None
        if self._url.scheme == "https":
            cached = self._tls or tls_context.cache_info().currsize
            context = self._tls or (tls_context() if cached else await asyncio.to_thread(tls_context))
        sock = await start_connection(
            await self._addresses(),
            happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY_S,
            interleave=1,
            socket_factory=_new_socket,
        )
        try:
            transport, connection = await loop.create_connection(
                lambda: kind(self._add_idle, self._open.discard, polite=self._polite), sock=sock
            )
        except BaseException:
            sock.close()
            raise
        if context is not None:
            # TLS is started separately, because asyncio's `create_connection` leaves a connection open if its handshake
            # is cancelled.
            host = (self._url.raw_host or "").rstrip(".")
            tls_transport = await loop.start_tls(transport, connection, context, server_hostname=host)
            assert tls_transport is not None
            connection.connection_made(tls_transport)  # `start_tls` does not call it
        return connection

    async def _addresses(self) -> Sequence[AddrInfoType]:
        """Return the addresses of the host; a successful lookup is reused for `DNS_CACHE_S` seconds."""
        if self._checked:
            return [_address_info(address, self._url.port or 0) for address in self._checked]
        loop = asyncio.get_running_loop()
        lookup = self._lookup
        if lookup is None or (lookup.done() and loop.time() >= self._lookup_expires_at):
            lookup = self._lookup = asyncio.create_task(self._look_up())
            # If all waiters are cancelled, no one retrieves the exception, and asyncio would log it. So it is retrieved
            # here.
            lookup.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(lookup)

    async def _look_up(self) -> Sequence[AddrInfoType]:
        loop = asyncio.get_running_loop()
        self._lookup_expires_at = 0.0  # a failed lookup is not reused
        addresses = await loop.getaddrinfo(self._url.raw_host, self._url.port, type=socket.SOCK_STREAM)
        self._lookup_expires_at = loop.time() + DNS_CACHE_S
        return addresses

    def _add_idle(self, connection: HttpClientConnection) -> None:
        self._idle.append(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._close_expired)

    def _close_expired(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        oldest = loop.time() - KEEP_ALIVE_S
        kept = []
        for connection in self._idle:
            if connection.is_idle and connection.idle_since > oldest:
                kept.append(connection)
            else:
                connection.close()
        self._idle = kept
        if kept:
            self._timer = loop.call_at(kept[0].idle_since + KEEP_ALIVE_S, self._close_expired)


def _address_info(address: str, port: int) -> AddrInfoType:
    if ":" in address:
        return socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, 0)
    return socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port)


def _new_socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    sock.setblocking(False)
    return sock


@cache
def tls_context() -> ssl.SSLContext:
    """Return the default TLS context, which trusts the system's certificate authorities."""
    # Loading the system's certificates takes about 20 ms.
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
