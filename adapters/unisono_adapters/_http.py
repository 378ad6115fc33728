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
from unisono_adapters._abort import Dropping, Polite
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
LATE_READ_S = 0.05  # for reading bytes that arrived in time while the event loop was busy
LINGER_S = 0.1  # for the end of a finished answer, so that its connection can be reused
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


class _Watch:
    """Deadlines of one answer, on one timer that is moved only when it fires.

    Time spent waiting for the backend counts. Time that the reader spends elsewhere counts only for the total
    limit. On expiry the socket is dropped, which wakes its reader."""

    __slots__ = ("_due_at", "_first", "_is_late", "_loop", "_response", "_silence_s", "_timer", "_total_at", "expired")

    def __init__(self, started: float, timeouts: Timeouts, response: aiohttp.ClientResponse) -> None:
        self._loop = asyncio.get_running_loop()
        self._response = response
        self._silence_s = timeouts.silence_s
        self._total_at = started + timeouts.total_s
        self._due_at: float | None = started + timeouts.first_token_s
        self._first = True
        self._is_late = False
        self.expired: str | None = None
        self._timer = self._loop.call_at(min(self._due_at, self._total_at), self._on_timer)

    def waiting(self) -> None:
        if self._due_at is None:
            self._due_at = self._loop.time() + self._silence_s

    def delivered(self) -> None:
        """Stop the silence limit after data arrived, until `waiting`."""
        self._due_at = None
        self._is_late = False
        if self._first:
            self._first = False
            self._timer.cancel()
            self._timer = self._loop.call_at(min(self._loop.time() + self._silence_s, self._total_at), self._on_timer)

    def stop(self) -> None:
        self._timer.cancel()

    def _on_timer(self) -> None:
        now = self._loop.time()
        # No reader waits: the earliest end of a silence that would begin now.
        due = now + self._silence_s if self._due_at is None else self._due_at
        if now >= self._total_at:
            self.expired = "the answer exceeded the total time limit"
        elif now >= due and not self._is_late:
            self._is_late = True
            self._timer = self._loop.call_at(min(now + LATE_READ_S, self._total_at), self._on_timer)
            return
        elif now >= due:
            self.expired = (
                "the backend sent no first token in time"
                if self._first
                else "the backend stopped sending in the middle of its answer"
            )
        else:
            self._timer = self._loop.call_at(min(due, self._total_at), self._on_timer)
            return
        self._response.close()


class BackendAnswer:
    """Stream of events. `close` is allowed at any time, cheap and repeatable."""

    __slots__ = ("_content", "_cutter", "_ended", "_live", "_response", "_watch")

    def __init__(
        self, response: aiohttp.ClientResponse, framing: Framing, watch: _Watch, live: set[BackendAnswer]
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
        try:
            async with asyncio.timeout(LINGER_S):
                while await self._content.readany():
                    pass
        except CAUGHT:
            # The answer is complete. Only the connection is lost, and `close` drops it.
            return

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
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._send(path, body, headers, limits)
                try:
                    await self._expect_events(response, framing)
                except BaseException:
                    response.close()
                    raise
        except TimeoutError as error:
            if isinstance(error, aiohttp.ClientError):
                raise fault(error) from error
            raise BackendTimeout("the backend sent no first token in time") from error
        except CAUGHT as error:
            raise fault(error) from error
        return BackendAnswer(response, framing, _Watch(started, timeouts, response), self._live)

    async def post_whole(self, path: str, body: bytes, job: Job) -> object:
        """Send a JSON body and return the decoded JSON response. Raises the `BackendError` family."""
        limits = aiohttp.ClientTimeout(total=None, connect=job.timeouts.connect_s)
        try:
            async with asyncio.timeout(job.timeouts.total_s):
                response = await self._send(path, body, self._headers_for(job, "application/json"), limits)
                try:
                    answer = await _read_body(response, MAX_PASSTHROUGH_BYTES)
                    if response.status != 200:
                        raise self.failures.refusal(response.status, answer, response.headers)
                    if isinstance(answer, str):
                        raise BackendProtocolError("the backend's answer is not JSON")
                    return answer
                finally:
                    response.close()
        except TimeoutError as error:
            if isinstance(error, aiohttp.ClientError):
                raise fault(error) from error
            raise BackendTimeout("the answer exceeded the total time limit") from error
        except CAUGHT as error:
            raise fault(error) from error

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
        try:
            async with asyncio.timeout(PROBE_S):
                async with self._open().request(
                    method, self._base.joinpath(path), data=data, headers=headers, allow_redirects=False
                ) as response:
                    body = await _read_body(response)
                    if response.status != 200:
                        raise self.failures.refusal(response.status, body, response.headers)
                    if isinstance(body, str):
                        raise BackendProtocolError(
                            "the backend answered a status request with something other than JSON"
                        )
                    return body
        except TimeoutError as error:
            raise BackendTimeout("the backend did not answer a status request in time") from error
        except CAUGHT as error:
            raise fault(error) from error

    async def get_page(self, path: str, within_s: float, longest: int) -> bytes | None:
        """Return the body of a status page; None if the server has none.

        Raises the `BackendError` family: BackendProtocolError for more than `longest` bytes."""
        try:
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
                    if len(page) > longest:
                        raise BackendProtocolError("the backend's status page is too large")
                return bytes(page)
        except TimeoutError as error:
            raise BackendTimeout("the backend did not answer a status request in time") from error
        except CAUGHT as error:
            raise fault(error) from error

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


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    return made


async def _note_reuse(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.reused = True


async def _read_body(response: aiohttp.ClientResponse, longest: int = MAX_RESPONSE_BYTES) -> object:
    """Return the first `longest` bytes of a body, decoded if it is JSON, else as text."""
    body = bytearray()
    while len(body) < longest:
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
