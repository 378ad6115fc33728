"""HTTP connection pool of one backend: sending requests and receiving event streams.

Only the `BackendError` family and `ContextTooLong` are raised. A request that is cancelled, closed or timed out drops
its socket at once. No proxy, redirect, cookie, netrc or compression is used. Only the headers listed here are sent.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, Protocol

import aiohttp
import orjson
from yarl import URL

from unisono.core.generation import Timeouts
from unisono.core.ports import BackendOptions
from unisono.core.renamed import renamed
from unisono.core.trace_context import TraceContext
from unisono.errors import BackendProtocolError, BackendTimeout, BackendUnavailable, ConfigError
from unisono_adapters._abort import NOT_COMPLETE, NOT_STARTED, AbortTimer, Dropping, Polite
from unisono_adapters._failures import CAUGHT, MAX_DETAIL_LENGTH, FailureTable, Statuses, fault
from unisono_adapters._framing import SSE, Framing

KEEP_ALIVE_S = 4.0  # lifetime of idle connections, below uvicorn's default of 5 s
PROBE_S = 10.0
MAX_RESPONSE_BYTES = 4 * 1024 * 1024  # for an answer that is not a stream, in bytes
MAX_PASSTHROUGH_BYTES = 64 * 1024 * 1024  # the same in pass-through
# These three limit the memory of a stream whose client reads nothing, together with the objects made from the bytes.
MAX_BATCH_BYTES = 8 * 1024  # of a stream, processed before other streams get their turn
BUFFER_BYTES = 16 * 1024  # reading from the backend pauses when twice as many are buffered
# Receive buffer of a backend's socket. By default the system grows it to tens of megabytes.
RECEIVE_BUFFER_BYTES = 32 * 1024
LINGER_S = 0.1  # for the end of a finished answer, so that its connection can be reused
NO_STATUS = "the backend did not answer a status request in time"
NO_PAGE = (400, 403, 404, 405, 501)  # for a page that a server does not have or was started without

_HEADER_SAFE = re.compile(r"[A-Za-z0-9._:-]{1,120}")


class Job(Protocol):
    """Properties of a request that matter for HTTP."""

    @property
    def timeouts(self) -> Timeouts: ...

    @property
    def request_id(self) -> str: ...

    @property
    def trace(self) -> TraceContext | None: ...


class BackendAnswer:
    """Stream of events. `close` is allowed at any time, cheap and repeatable."""

    __slots__ = ("_content", "_cutter", "_ended", "_live", "_response", "_watch")

    def __init__(
        self, response: aiohttp.ClientResponse, framing: Framing, watch: AbortTimer, live: set[BackendAnswer]
    ) -> None:
        """Register in `live` until closed."""
        self._live = live
        live.add(self)
        self._response = response
        self._content = response.content
        self._watch = watch
        self._cutter = framing.cutter()
        self._ended = False

    async def read(self) -> list[bytes] | None:
        """Return the data of the events that one read completed, or None at the end of the stream.

        The list may be empty. Hardly more is read from the backend than is returned."""
        if self._ended:
            return None
        self._watch.waiting()
        try:
            read = await self._content.read(MAX_BATCH_BYTES)
            if read:
                if len(read) == MAX_BATCH_BYTES:
                    # Available data is read without waiting, so yield to other tasks.
                    await asyncio.sleep(0)
                return self._cutter.feed(read)
            self._ended = True
            return self._cutter.end()
        except CAUGHT as error:
            if self._watch.expired is not None:
                raise BackendTimeout(self._watch.expired) from error
            raise fault(error) from error

    def delivered(self) -> None:
        """Mark a read as having brought tokens: comments and empty events are no sign of life."""
        self._watch.delivered()

    async def settle(self) -> None:
        """Read a finished answer briefly to its end, so that the connection can be reused."""
        if self._content.at_eof():
            return
        # The answer is complete. A failure loses only the connection, and `close` drops it.
        with suppress(*CAUGHT):
            async with asyncio.timeout(LINGER_S):
                while await self._content.readany():
                    pass

    def close(self) -> None:
        self._live.discard(self)
        self._watch.stop()
        self._response.close()


class BackendHttp:
    """HTTP client of one backend. Construction does no I/O; the pool opens on first use."""

    def __init__(self, options: BackendOptions, statuses: Statuses | None = None, *, polite: bool = False) -> None:
        """Create a client; `statuses` replace the errors of single HTTP statuses.

        With `polite`, an abort before the response head sends FIN, not RST, so that the backend can still send
        the head. Some backends otherwise never end such a request. Raises ConfigError for an unusable address
        or key."""
        self._response_class = Polite if polite else Dropping
        self._base = _base(options.api_base)
        secret = options.api_key or None
        query = self._base.query.values()
        self.failures = FailureTable(statuses, filter(None, (secret, self._base.password, *query)))
        self._headers = {"User-Agent": "unisono", "Accept-Encoding": "identity"}
        if secret is not None:
            if not (secret.isascii() and secret.isprintable()):
                raise ConfigError("litellm_params.api_key: must contain printable ASCII characters only")
            if self._base.user is not None:
                raise ConfigError("litellm_params.api_base: contains credentials although api_key is set; set only one")
            self._headers["Authorization"] = f"Bearer {secret}"
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._live: set[BackendAnswer] = set()
        self._serial = itertools.count(1)

    async def post(self, path: str, body: bytes, job: Job, framing: Framing = SSE) -> BackendAnswer:
        """Send a JSON body and return the event stream. Raises the `BackendError` family."""
        headers = self._headers_for(job, framing.content_type)
        timeouts = job.timeouts
        started = asyncio.get_running_loop().time()
        deadline = started + min(timeouts.first_token_s, timeouts.total_s)
        limits = aiohttp.ClientTimeout(total=None, connect=timeouts.connect_s)
        with _mapped_failures(NOT_STARTED):
            async with asyncio.timeout_at(deadline):
                response = await self._send(path, body, headers, limits)
                try:
                    await self._expect_events(response, framing)
                except BaseException:
                    response.close()
                    raise
        return BackendAnswer(response, framing, AbortTimer(started, timeouts, response), self._live)

    async def post_whole(self, path: str, body: bytes, job: Job) -> object:
        """Send a JSON body and return the decoded JSON response. Raises the `BackendError` family."""
        limits = aiohttp.ClientTimeout(total=None, connect=job.timeouts.connect_s)
        with _mapped_failures(NOT_COMPLETE):
            async with asyncio.timeout(job.timeouts.total_s):
                response = await self._send(path, body, self._headers_for(job, "application/json"), limits)
                try:
                    return await self._json_of(response, MAX_PASSTHROUGH_BYTES, "the backend's answer is not JSON")
                finally:
                    response.close()

    def _headers_for(self, job: Job, accept: str) -> dict[str, str]:
        headers = self._headers | {"Content-Type": "application/json", "Accept": accept}
        if _HEADER_SAFE.fullmatch(job.request_id):
            # Numbered, since one client request may become several concurrent generations.
            headers["X-Request-Id"] = f"{job.request_id}-{next(self._serial)}"
        return headers if job.trace is None else headers | job.trace.headers

    async def get_json(self, path: str, request_body: object = None) -> Any:
        """Request a small JSON document. POST `request_body` if given. Raises BackendError."""
        method, headers, data = "GET", self._headers, None
        if request_body is not None:
            method, data = "POST", orjson.dumps(request_body)
            headers = headers | {"Content-Type": "application/json"}
        not_json = "the backend answered a status request with something other than JSON"
        with _mapped_failures(NO_STATUS):
            async with (
                asyncio.timeout(PROBE_S),
                self._open().request(
                    method, self._base.joinpath(path), data=data, headers=headers, allow_redirects=False
                ) as response,
            ):
                return await self._json_of(response, MAX_RESPONSE_BYTES, not_json)

    async def _json_of(self, response: aiohttp.ClientResponse, max_bytes: int, not_json: str) -> Any:
        body = await _read_body(response, max_bytes)
        if response.status != 200:
            raise self.failures.refusal(response.status, body, response.headers)
        if isinstance(body, str):
            raise BackendProtocolError(not_json)
        return body

    async def get_page(self, path: str, within_s: float, max_bytes: int) -> bytes | None:
        """Return the body of a status page; None if the server has none.

        Raises the `BackendError` family: BackendProtocolError for more than `max_bytes` bytes."""
        with _mapped_failures(NO_STATUS):
            async with (
                asyncio.timeout(within_s),
                self._open().request(
                    "GET", self._base.joinpath(path), headers=self._headers, allow_redirects=False
                ) as response,
            ):
                if response.status in NO_PAGE:
                    return None
                if response.status != 200:
                    raise self.failures.refusal(response.status, await _read_body(response), response.headers)
                page = bytearray()
                while read := await response.content.readany():
                    page += read
                    if len(page) > max_bytes:
                        raise BackendProtocolError("the backend's status page is too large")
                return bytes(page)

    async def aclose(self) -> None:
        """Close the running answers, whose readers then fail, and the pool. Repeatable."""
        self._closed = True
        for answer in list(self._live):
            answer.close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _send(
        self, path: str, body: bytes, headers: dict[str, str], limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """Send a POST; retry once if a reused connection is dead before its first byte."""
        url = self._base.joinpath(path)
        trace = SimpleNamespace(reused=False)
        try:
            return await self._open().post(
                url, data=io.BytesIO(body), headers=headers, timeout=limits, allow_redirects=False,
                trace_request_ctx=trace,
            )  # fmt: skip
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if not trace.reused or isinstance(error, aiohttp.ClientConnectorError):
                raise
        return await self._open().post(
            url, data=io.BytesIO(body), headers=headers, timeout=limits, allow_redirects=False
        )

    async def _expect_events(self, response: aiohttp.ClientResponse, framing: Framing) -> None:
        if response.status != 200:
            body = await _read_body(response)
            raise self.failures.refusal(response.status, body, response.headers)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise BackendProtocolError("the backend compressed its answer although compression was not requested")
        if response.content_type == framing.content_type:
            return
        raise self.failures.not_events(response.content_type, await _read_body(response))

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise BackendUnavailable("the backend is being removed")
        if self._session is None:
            trace = aiohttp.TraceConfig()
            trace.on_connection_reuseconn.append(_note_reuse)
            self._session = aiohttp.ClientSession(
                # Unlimited: the gateway decides about concurrency, and a queue here would be invisible.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, socket_factory=_socket),
                read_bufsize=BUFFER_BYTES,
                cookie_jar=aiohttp.DummyCookieJar(),
                response_class=self._response_class,
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None),
                trace_configs=[trace],
            )
        return self._session


@contextmanager
def _mapped_failures(timeout_message: str) -> Iterator[None]:
    """Raise failures of the client library as BackendError, with this message for a timeout."""
    try:
        yield
    except CAUGHT as error:
        # The library's own timeouts have a message of their own.
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
            raise BackendTimeout(timeout_message) from error
        raise fault(error) from error


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    return made


async def _note_reuse(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.reused = True


async def _read_body(response: aiohttp.ClientResponse, max_bytes: int = MAX_RESPONSE_BYTES) -> object:
    """Return the first `max_bytes` bytes of a body, decoded if it is JSON, else as text."""
    body = bytearray()
    while len(body) < max_bytes:
        read = await response.content.readany()
        if not read:
            break
        body += read
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[: MAX_DETAIL_LENGTH * 8].decode("utf-8", errors="replace")


def _base(api_base: str | None) -> URL:
    if not api_base:
        raise ConfigError("litellm_params.api_base: missing; this backend kind needs the address of its server")
    try:
        url = URL(api_base.rstrip("/").removesuffix("/v1"))
    except ValueError as error:
        raise ConfigError(f"litellm_params.api_base: not a valid URL ({error})") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError("litellm_params.api_base: must begin with http:// or https:// and name a host")
    return url


def __getattr__(name: str) -> object:
    return renamed(__name__, name, {"Wire": BackendHttp})
