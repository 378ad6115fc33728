"""Prometheus metrics: `/metrics` with a key, and on a local listener without a key."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from unisono.api.allowed_clients import is_local_host_header
from unisono.api.route_table import READ_404, RouteTable, dependency
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.errors import ConfigError, NotAllowed, NotFound
from unisono.net.special_addresses import loopback_address

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# Maximum size of a request to the listener in bytes.
MAX_REQUEST_BYTES: Final = 8 * 1024
# Time limit of the listener for a request, and for its response, in seconds.
WITHIN_S: Final = 5.0
# Requests served at the same time. A scraper needs one connection.
AT_ONCE: Final = 16

# Return the metrics as text; None if metrics are disabled.
MetricsPage = Callable[[], Awaitable[bytes | None]]


METRICS = RouteTable("gateway", prefixes=("",))


@dataclass(frozen=True, slots=True)
class MetricsSource:
    """Source of the metrics.

    If `names_keys` is True, only callers who may read everything may read the metrics.
    """

    page: MetricsPage
    names_keys: bool


@METRICS.add("GET", "/metrics", READ_404, response_class=PlainTextResponse, direct=True)
async def get_metrics(request: Request) -> Response:
    """Return metrics in Prometheus format."""
    source = dependency(request, MetricsSource)
    caller: Caller = request.state.caller
    if source.names_keys and not caller.sees_all:
        raise NotAllowed(
            "These metrics contain the names of other keys: use the master key, or the key of an admin or viewer."
        )
    text = await source.page()
    if text is None:
        raise NotFound("Metrics are disabled on this gateway; the operator can set `unisono.metrics`.")
    return Response(text, media_type=CONTENT_TYPE)


class MetricsListener:
    """Server for `GET /metrics` at a loopback `address`, with one request per connection.

    With `shared`, several processes listen on the address, and each of them answers with the metrics of all processes.
    """

    def __init__(self, address: str, page: MetricsPage, *, shared: bool = False) -> None:
        self._host, self._port = loopback_address(address)
        self._metrics_page = page
        self._shared = shared
        self._server: asyncio.Server | None = None
        self._open_requests = 0

    async def start(self) -> None:
        """Start listening. Raises ConfigError if the address is in use or cannot be used."""
        try:
            self._server = await asyncio.start_server(
                self._answer, self._host, self._port, limit=MAX_REQUEST_BYTES, reuse_port=self._shared or None
            )
        except OSError as error:
            raise ConfigError(
                f"unisono.metrics_listen: cannot listen on {self._host}:{self._port}: {os.strerror(error.errno or 0)}; "
                "choose another address"
            ) from error

    @property
    def port(self) -> int:
        """Actual port of the listener."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open_requests += 1
        try:
            async with asyncio.timeout(WITHIN_S):
                if self._open_requests <= AT_ONCE:
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._response_to(head))
                    await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            # The client sent no complete HTTP request in time, or did not read the response. It gets no error.
            pass
        finally:
            self._open_requests -= 1
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _response_to(self, head: bytes) -> bytes:
        line, *headers = head.decode("latin-1").split("\r\n")
        words = line.split(" ")
        fields = [header.partition(":") for header in headers]
        hosts = [value.strip() for name, _, value in fields if name.lower() == "host"]
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _text_response("400 Bad Request")
        if len(hosts) != 1 or not is_local_host_header(hosts[0]):
            return _text_response("403 Forbidden")
        if words[1].partition("?")[0] != "/metrics":
            return _text_response("404 Not Found")
        if words[0] not in {"GET", "HEAD"}:
            return _text_response("405 Method Not Allowed")
        return _text_response("200 OK", await self._metrics_page() or b"", has_body=words[0] == "GET")


def _text_response(status: str, body: bytes = b"", *, has_body: bool = True) -> bytes:
    fields = f"content-type: {CONTENT_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close"
    return f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + (body if has_body else b"")
