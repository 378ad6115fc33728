"""What Prometheus reads: `/metrics` behind a key, and on a listener of its own for this machine without one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import Final

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.requests import Request

from unisono.core.access import Caller
from unisono.errors import NotAllowed, NotFound

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MOST_BYTES: Final = 8 * 1024
"""Of a request to the listener."""
WITHIN_S: Final = 5.0
"""How long a client of the listener may take, for its request and for the answer."""
AT_ONCE: Final = 16

Shown = Callable[[], Awaitable[bytes | None]]
"""The text; None when nothing is counted."""


def metrics_router(shown: Shown, *, names_keys: bool) -> APIRouter:
    """`/metrics`. Where the numbers name keys, only the operator's own key reads them."""
    router = APIRouter(include_in_schema=False)

    async def metrics(request: Request) -> Response:
        caller: Caller = request.state.caller
        if names_keys and caller.key:
            raise NotAllowed("These metrics name the keys of others; the master key reads them.")
        text = await shown()
        if text is None:
            raise NotFound("Metrics are switched off here.")
        return Response(text, media_type=CONTENT_TYPE)

    router.add_route("/metrics", metrics, methods=["GET", "HEAD"])
    return router


def listening_address(listen: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises ValueError, also for a host that others can reach."""
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not (port.isascii() and port.isdigit()) or not 0 <= int(port) < 1 << 16:
        raise ValueError("say it as host:port")
    host = "127.0.0.1" if host == "localhost" else host
    if not ip_address(host).is_loopback:
        raise ValueError("it asks for no key, so only this machine may reach it: listen on 127.0.0.1")
    return host, int(port)


class MetricsListener:
    """Answers `GET /metrics` at `address`, one request per connection, to whoever is on this machine. `shared` lets
    several processes listen there; whichever gets the connection answers."""

    def __init__(self, address: str, shown: Shown, *, shared: bool = False) -> None:
        self._host, self._port = listening_address(address)
        self._shown = shown
        self._shared = shared
        self._server: asyncio.Server | None = None
        self._answering = 0

    async def start(self) -> None:
        """Raises OSError where somebody else listens."""
        self._server = await asyncio.start_server(
            self._answer, self._host, self._port, limit=MOST_BYTES, reuse_port=self._shared or None
        )

    @property
    def port(self) -> int:
        """The one that it listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._answering += 1
        try:
            async with asyncio.timeout(WITHIN_S):
                if self._answering <= AT_ONCE:
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._answer_to(head))
                    await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            # Nobody who speaks HTTP waits for an answer there.
            pass
        finally:
            self._answering -= 1
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer_to(self, head: bytes) -> bytes:
        line, *headers = head.decode("latin-1").split("\r\n")
        words = line.split(" ")
        fields = [header.partition(":") for header in headers]
        hosts = [value.strip() for name, _, value in fields if name.lower() == "host"]
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _plain("400 Bad Request")
        if len(hosts) != 1 or not _names_this_machine(hosts[0]):
            return _plain("403 Forbidden")
        if words[1].partition("?")[0] != "/metrics":
            return _plain("404 Not Found")
        if words[0] not in {"GET", "HEAD"}:
            return _plain("405 Method Not Allowed")
        return _plain("200 OK", await self._shown() or b"", has_body=words[0] == "GET")


def _names_this_machine(host: str) -> bool:
    """As for a gateway without a key: a web page that made a name point here says that name."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.removeprefix("[").removesuffix("]")
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _plain(status: str, body: bytes = b"", *, has_body: bool = True) -> bytes:
    fields = f"content-type: {CONTENT_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close"
    return f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + (body if has_body else b"")
