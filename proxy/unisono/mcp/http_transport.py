"""HTTP transport to a tool server: dials only checked addresses and limits answers.

No exception reaches the SDK, where one failed request would end the connection of all callers. A failure is recorded in
the `Exchange` of the message, and the SDK receives an answer with an error status. Proxies, cookies and
compression are not used. Redirects are followed only within one origin, and never for a server that a request named.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from functools import cache
from typing import Any, Final

import anyio
import httpx2
from mcp.client.auth import OAuthFlowError

from unisono.core.frozen import dataclass
from unisono.mcp.limits import McpLimits
from unisono.mcp.messages import EXCHANGE, Exchange, encoded
from unisono.mcp.response_filter import EventStreamBody, ResponseRefused, WholeBody, too_large
from unisono.net.ssrf_guard import DestinationNotAllowed, DialTarget, public_target

# Status of the answer that replaces a failure for the SDK.
STAND_IN: Final = 502
# Suffix of the event that the HTTP library reports before it writes the first byte of a request.
WRITING_BEGINS: Final = "send_request_headers.started"
# Maximum number of redirects within the origin. The HTTP library also counts requests for access tokens.
MAX_REDIRECTS: Final = 10

_UNSENT: Final = (
    httpx2.ConnectError,
    httpx2.ConnectTimeout,
    httpx2.PoolTimeout,
    httpx2.UnsupportedProtocol,
    httpx2.LocalProtocolError,
)
_FAILURES: Final = (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OAuthFlowError, OSError, ValueError)
_PROBLEMS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (httpx2.ConnectTimeout, "the server accepted no connection within its limit `connect_timeout_s`"),
    (httpx2.ConnectError, "the connection attempt failed"),
    (OAuthFlowError, "no access token could be obtained; check `client_id`, `client_secret` and `issuer`"),
    (httpx2.TimeoutException, "the connection timed out"),
    (httpx2.RemoteProtocolError, "the answer was not valid HTTP"),
    (httpx2.TransportError, "the connection was lost"),
)


@cache
def default_tls() -> ssl.SSLContext:
    """Return the TLS context that trusts the usual certificate authorities.

    It is created once per process.
    """
    return httpx2.create_ssl_context(trust_env=False)


@dataclass(frozen=True, slots=True)
class Path:
    """Address of a server.

    `target` is the checked address if a request named the server, None for a configured server. `connect_s` is the
    timeout for connecting, in seconds. `issuer` is the URL of the OAuth server, if any.
    """

    url: str
    target: DialTarget | None = None
    tls: ssl.SSLContext | None = None
    connect_s: float = 10.0
    issuer: str | None = None


class HttpTransport(httpx2.AsyncBaseTransport):
    """Connections to one server.

    For a checked target, connections are opened only to its checked addresses; TLS and the Host header still use the
    target's name. The size of each answer is limited.
    """

    def __init__(self, path: Path, limits: McpLimits) -> None:
        self._path = path
        self._limits = limits
        self._endpoint = httpx2.URL(path.target.url if path.target else path.url)
        configured = (self._endpoint, *([httpx2.URL(path.issuer)] if path.issuer else []))
        self._configured_origins = frozenset(map(_origin, configured))
        self._inner = httpx2.AsyncHTTPTransport(
            verify=path.tls or True,
            trust_env=False,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=8, keepalive_expiry=30.0),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        exchange = EXCHANGE.get() or Exchange()
        if exchange.is_aborted:
            raise ResponseRefused("the request was cancelled")
        is_message = self._is_message(request)
        response = await self._connect(request, exchange if is_message else Exchange())
        if is_message:
            exchange.status = response.status_code
        response.headers.pop("set-cookie", None)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()
            raise ResponseRefused("the answer is compressed although compression was not requested")
        bounded = _Bounded(response, exchange, self._max_body_bytes(request, response))
        response.stream = (EventStreamBody if _is_event_stream(response) else WholeBody)(
            bounded, exchange, self._limits
        )
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _connect(self, request: httpx2.Request, exchange: Exchange) -> httpx2.Response:
        target = self._path.target
        if target is None:
            if _origin(request.url) in self._configured_origins:
                return await self._send(request, exchange)
            target = await _discovered(request.url)
        elif _origin(request.url) != (target.scheme, target.host, target.port):
            raise ResponseRefused("the request URL is not at the tool server's own host, port and scheme")
        for address in target.addresses[:-1]:
            try:
                return await self._send(_with_address(request, target, address), exchange)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                continue
        return await self._send(_with_address(request, target, target.addresses[-1]), exchange)

    async def _send(self, request: httpx2.Request, exchange: Exchange) -> httpx2.Response:
        async def note(event: str, _: object) -> None:
            if event.endswith(WRITING_BEGINS):
                if exchange.is_aborted:
                    # The caller no longer waits, and treats the request as unsent.
                    raise ResponseRefused("the request was cancelled")
                exchange.sent = True

        # Reset the record, which may contain the status of a redirect. This request may follow that redirect.
        exchange.ended, exchange.status = False, 0
        request.extensions = {**request.extensions, "trace": note}
        try:
            return await self._inner.handle_async_request(request)
        except _UNSENT:
            exchange.sent = False
            raise

    def _is_message(self, request: httpx2.Request) -> bool:
        """Return True for an MCP message or event stream.

        Return False for requests of OAuth tokens or metadata. Also return False for a request that resumes an
        interrupted answer: if that request fails, the original message has not failed.
        """
        if _origin(request.url) != _origin(self._endpoint) or "last-event-id" in request.headers:
            return False
        kind, accepted = request.headers.get("content-type", ""), request.headers.get("accept", "")
        return kind == "application/json" or "text/event-stream" in accepted

    def _max_body_bytes(self, request: httpx2.Request, response: httpx2.Response) -> int | None:
        """Return the maximum size of the body in bytes, or None for no limit.

        The SDK limits each event of an event stream. A stream that answers a message is also limited as a whole. A
        stream of notifications (GET) has no such limit, because it may last forever.
        """
        if not _is_event_stream(response):
            return self._limits.answer_bytes
        return None if request.method == "GET" else 4 * self._limits.answer_bytes


class _Bounded(httpx2.AsyncByteStream):
    """Body that raises `ResponseRefused` above `most` bytes or if its exchange is aborted."""

    def __init__(self, response: httpx2.Response, exchange: Exchange, most: int | None) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        self._inner = response.stream
        self._chunks = aiter(response.stream)
        self._exchange = exchange
        self._max_bytes = self._remaining = most

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        exchange, chunk = self._exchange, None
        try:
            with exchange.cancelled_on_abort():
                chunk = await anext(self._chunks)
            return self._count(chunk)
        except BaseException as error:
            exchange.ended = True
            if isinstance(error, httpx2.HTTPError):
                exchange.problem = exchange.problem or problem_of(error)
                # After this exception, the SDK fails only this message and continues the connection.
                raise ResponseRefused(exchange.problem) from None
            raise

    def _count(self, chunk: bytes | None) -> bytes:
        if chunk is None:
            raise ResponseRefused("the request was cancelled")
        if self._remaining is None or self._max_bytes is None:
            return chunk
        self._remaining -= len(chunk)
        if self._remaining < 0:
            self._exchange.is_too_large = True
            self._exchange.problem = too_large(self._max_bytes)
            raise ResponseRefused(self._exchange.problem)
        return chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


class Outgoing(httpx2.AsyncClient):
    """HTTP client of the SDK; `send` always returns an answer.

    `fragile` is True for the older (SSE) transport, which does not survive a failed request; `has_broken` is set by
    such a failure. `is_stale` is set when no connection to the server's addresses could be opened: open requests may
    continue, but the next connection has to resolve and check the server's name again.
    """

    def __init__(self, path: Path, limits: McpLimits, *, fragile: bool, **options: Any) -> None:
        super().__init__(
            **options,
            transport=HttpTransport(path, limits),
            trust_env=False,
            follow_redirects=False,
            max_redirects=0 if path.target else MAX_REDIRECTS,
            timeout=httpx2.Timeout(None, connect=path.connect_s),
        )
        self.has_broken = anyio.Event()
        self.is_stale = False
        self.was_redirected = False
        self._limits = limits
        self._is_fragile = fragile
        self._listened_at = -limits.reconnect_s

    def build_request(self, method: str, url: httpx2.URL | str, *, json: Any = None, **how: Any) -> httpx2.Request:
        """Build a request.

        In a tool call, the arguments are replaced with the exact text from the exchange record.
        """
        exchange = EXCHANGE.get()
        if exchange is None or not exchange.arguments or not isinstance(json, dict):
            return super().build_request(method, url, json=json, **how)
        headers = httpx2.Headers(how.pop("headers", None))
        headers["content-type"] = "application/json"
        return super().build_request(method, url, content=encoded(json, exchange.arguments), headers=headers, **how)

    async def send(self, request: httpx2.Request, **how: Any) -> httpx2.Response:
        """Return the answer or, after a failure, an answer with status `STAND_IN`.

        Raises only a cancellation.
        """
        exchange = EXCHANGE.get() or Exchange()
        if request.method == "GET":
            await self._pace()
        try:
            with exchange.cancelled_on_abort() as scope:
                if exchange.aside:
                    scope.deadline = anyio.current_time() + self._limits.aside_s
                response = await super().send(request, **how)
                if not response.is_redirect:
                    return response
                self.was_redirected = True
                return await self._redirected(request, response, exchange)
        except _FAILURES as error:
            exchange.problem = exchange.problem or problem_of(error)
            self.is_stale = self.is_stale or isinstance(error, _UNSENT)
        if self._is_fragile:
            self.has_broken.set()
        return httpx2.Response(STAND_IN, request=request)

    async def _redirected(
        self, request: httpx2.Request, response: httpx2.Response, exchange: Exchange
    ) -> httpx2.Response:
        if self.max_redirects:
            return response
        await response.aclose()
        exchange.problem = "the server sent a redirect, which is not followed"
        return httpx2.Response(STAND_IN, request=request)

    async def _pace(self) -> None:
        """Delay reconnection to a server that closes every listening stream.

        The delay applies regardless of the interval that the server announces.
        """
        loop = asyncio.get_running_loop()
        wait_s = self._listened_at + self._limits.reconnect_s - loop.time()
        self._listened_at = loop.time() + max(wait_s, 0.0)
        if wait_s > 0:
            await asyncio.sleep(wait_s)


def problem_of(error: BaseException) -> str:
    """Describe a failed exchange for clients and the log, without addresses or content."""
    if isinstance(error, ResponseRefused):
        return str(error)
    return next((words for kind, words in _PROBLEMS if isinstance(error, kind)), "the request failed")


async def _discovered(url: httpx2.URL) -> DialTarget:
    """Return the checked target of a URL from the OAuth metadata of a configured server.

    Raises `ResponseRefused` if the URL does not resolve to a public address.
    """
    try:
        return await public_target(str(url))
    except (DestinationNotAllowed, UnicodeError):
        raise ResponseRefused(
            "the server's OAuth metadata has a URL that is neither public nor on the origin of the server or its "
            "`issuer`; correct the metadata or `issuer`"
        ) from None


def _with_address(request: httpx2.Request, target: DialTarget, address: str) -> httpx2.Request:
    """Copy the request, so that it is sent to the IP address `address`.

    The Host header and the certificate check still use the original host name.
    """
    return httpx2.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": target.host},
    )


def _is_event_stream(response: httpx2.Response) -> bool:
    return response.headers.get("content-type", "").lower().startswith("text/event-stream")


def _origin(url: httpx2.URL) -> tuple[str, str, int]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme, 0)
