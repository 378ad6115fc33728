"""HTTP client of one backend: sending requests and receiving event streams.

Raises only ContextTooLong, BackendError and its subclasses. When a request is cancelled, closed or times out, its
connection is closed at once. The client does not use proxies, redirects, cookies, netrc or compression. It sends no
headers except those in this module.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from asyncio import Future
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import orjson
from yarl import URL

from unisono.core.error_texts import incomplete, no_first_token, seconds, silent
from unisono.core.generation import Timeouts
from unisono.core.passthrough_request import Upload
from unisono.core.ports import BackendOptions
from unisono.core.renamed import renamed
from unisono.core.trace_context import TraceContext
from unisono.errors import BackendProtocolError, BackendTimeout, ConfigError
from unisono.net.connection_pool import ConnectionPool
from unisono.net.http_response import HttpResponse
from unisono_adapters._failures import CAUGHT, MAX_DETAIL_LENGTH, FailureTable, Statuses, fault
from unisono_adapters._framing import SSE, Framing
from unisono_adapters._response_timeouts import BACKEND, AbortTimer

PROBE_S = 10.0  # seconds for a status request
MAX_RESPONSE_BYTES = 4 * 1024 * 1024  # of a response that is not a stream
MAX_PASSTHROUGH_BYTES = 64 * 1024 * 1024  # of a pass-through response that is not a stream
MAX_BATCH_BYTES = 8 * 1024  # of one stream that are processed before other streams get a turn
LINGER_S = 0.1  # seconds to wait for the end of a complete answer, so that its connection can be reused
NO_STATUS = "the backend did not answer a status request within {limit}; check the load of the backend"
NO_PAGE = (400, 403, 404, 405, 501)  # HTTP statuses of servers that do not have a page, or have turned it off

# Header line of a request that accepts any media type.
ACCEPT_ANY = "Accept: */*\r\n"
_HEADER_SAFE = re.compile(r"[A-Za-z0-9._:-]{1,120}")


class Job(Protocol):
    """Properties of a request that the HTTP client needs."""

    @property
    def timeouts(self) -> Timeouts: ...

    @property
    def request_id(self) -> str: ...

    @property
    def trace(self) -> TraceContext | None: ...


class BackendAnswer:
    """Stream of events from a backend. `close` may be called at any time and repeatedly."""

    __slots__ = ("_cutter", "_watch", "delivered", "is_ended", "response", "should_yield")

    def __init__(self, response: HttpResponse, framing: Framing, watch: AbortTimer) -> None:
        self.response = response
        self._watch = watch
        self._cutter = framing.cutter()
        # The caller calls this after a read that contained tokens. Comments and empty events do not restart the limit
        # for silence.
        self.delivered = watch.delivered
        # True if the last read was as long as allowed. The caller must then yield to other tasks before it reads again.
        self.should_yield = False
        self.is_ended = False  # True once all events were returned

    def next_data(self, consume: Callable[[list[bytes]], bool] | None = None) -> Future[None]:
        """Return a future that is done when data, the end of the stream or a failure arrives.

        Call this method only while nothing is readable. If `consume` is given, the network callback passes the events
        of each small read to it instead of completing the future. The future stays pending as long as `consume` returns
        True. If `consume` raises an exception, the future gets the exception.
        """
        watch = self._watch
        if watch.due_at is None:
            watch.start_silence()
        return self.response.next_data(None if consume is None else partial(self._give, consume))

    def _give(self, consume: Callable[[list[bytes]], bool], read: bytes) -> bool:
        if not consume(self._events_of(read)):
            return False
        if self._watch.due_at is None:
            self._watch.start_silence()
        return True

    def _events_of(self, read: bytes) -> list[bytes]:
        if self._watch.expired is not None:
            raise BackendTimeout(self._watch.expired)
        self.should_yield = False
        try:
            return self._cutter.feed(read)
        except CAUGHT as error:
            raise fault(error) from error

    def read_nowait(self) -> list[bytes]:
        """Return the data of the events that have arrived; the list may be empty.

        Call this method only while `response` is readable. Raises BackendError or a subclass.
        """
        if self._watch.expired is not None:
            raise BackendTimeout(self._watch.expired)
        try:
            read = self.response.read_nowait(MAX_BATCH_BYTES)
            if read:
                self.should_yield = len(read) == MAX_BATCH_BYTES
                return self._cutter.feed(read)
            self.is_ended = True
            return self._cutter.end()
        except CAUGHT as error:
            raise fault(error) from error

    async def read(self) -> list[bytes] | None:
        """Wait for events and return their data, or None at the end of the stream.

        The list may be empty. Raises BackendError or a subclass.
        """
        if self.is_ended:
            return None
        if self.should_yield:
            await asyncio.sleep(0)
        while not self.response.is_readable:
            await self.next_data()
        return self.read_nowait()

    async def settle(self) -> None:
        """After the last event, wait up to `LINGER_S` seconds for the end of the response.

        The connection can be reused only after the response has ended.
        """
        if self.response.is_complete:
            return
        # All events have arrived. After a failure here, only the connection is lost: `close` closes it.
        with suppress(*CAUGHT):
            async with asyncio.timeout(LINGER_S):
                while await self.response.read(MAX_BATCH_BYTES):
                    pass

    def close(self) -> None:
        self._watch.stop()
        self.response.close()


class BackendBytes:
    """Response of any media type, read in pieces as they arrive."""

    def __init__(self, response: HttpResponse, timeouts: Timeouts, ends_at: float) -> None:
        self.media_type = response.headers.get("content-type", "application/octet-stream")
        self.close = response.close
        self._response = response
        self._timeouts = timeouts
        self._ends_at = ends_at

    async def read(self) -> bytes:
        """Return the next bytes, empty at the end. Raises BackendError or a subclass."""
        due_at = asyncio.get_running_loop().time() + self._timeouts.silence_s
        message = silent(BACKEND, self._timeouts) if due_at < self._ends_at else incomplete(self._timeouts)
        with _mapped_failures(message):
            async with asyncio.timeout_at(min(due_at, self._ends_at)):
                return await self._response.read(MAX_BATCH_BYTES)


class BackendHttp:
    """HTTP client of one backend. Construction does no I/O; connections open on first use."""

    def __init__(self, options: BackendOptions, statuses: Statuses | None = None, *, polite: bool = False) -> None:
        """Create a client.

        `statuses` replace entries of `_failures.STATUSES` for this kind of backend. With `polite`, a request that is
        aborted before the response head is closed with FIN instead of RST, so that the backend can still send the head.
        After an RST, some backends never end such a request. Raises ConfigError if the address or the key is invalid.
        """
        self._base = _base(options.api_base)
        secret = options.api_key or None
        self.failures = FailureTable(statuses, filter(None, (secret, self._base.password)))
        fixed = {
            "Host": self._base.host_port_subcomponent or "",
            "User-Agent": "unisono",
            "Accept-Encoding": "identity",
        }
        if secret is not None:
            if not (secret.isascii() and secret.isprintable()):
                raise ConfigError("litellm_params.api_key: must contain only printable ASCII characters")
            if self._base.user is not None:
                raise ConfigError("litellm_params.api_base: contains credentials and api_key is also set; remove one")
            fixed["Authorization"] = f"Bearer {secret}"
        elif self._base.user is not None or self._base.password is not None:
            credentials = f"{self._base.user or ''}:{self._base.password or ''}"
            fixed["Authorization"] = f"Basic {b64encode(credentials.encode()).decode()}"
        self._targets: dict[str, str] = {}
        self._fixed_lines = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._pool = ConnectionPool(self._base, polite=polite)
        self._serial = itertools.count(1)

    async def post(self, path: str, body: bytes, job: Job, framing: Framing = SSE) -> BackendAnswer:
        """Send a JSON body and return the event stream. Raises BackendError or a subclass."""
        timeouts = job.timeouts
        started = asyncio.get_running_loop().time()
        deadline = started + min(timeouts.first_token_s, timeouts.total_s)
        # `_mapped_failures` and `_send` are inlined here, because this code runs for every generation.
        try:
            async with asyncio.timeout_at(deadline):
                head = self._head("POST", path, self._headers_for(job, framing.content_type), len(body))
                response = await self._pool.send(head, body, timeouts.connect_s)
                try:
                    await self._expect_events(response, framing)
                except BaseException:
                    response.close()
                    raise
        except TimeoutError as error:
            raise BackendTimeout(no_first_token(BACKEND, timeouts)) from error
        except CAUGHT as error:
            raise fault(error) from error
        return BackendAnswer(response, framing, AbortTimer(started, timeouts, response))

    async def post_whole(self, path: str, body: bytes, job: Job) -> object:
        """Send a JSON body and return the decoded JSON response. Raises BackendError or a subclass."""
        with _mapped_failures(incomplete(job.timeouts)):
            async with asyncio.timeout(job.timeouts.total_s):
                headers = self._headers_for(job, "application/json")
                response = await self._send("POST", path, headers, body, job.timeouts.connect_s)
                try:
                    return await self._json_of(response, MAX_PASSTHROUGH_BYTES, "the backend's answer is not JSON")
                finally:
                    response.close()

    async def post_bytes(self, path: str, body: bytes | Upload, job: Job, model: str) -> BackendBytes:
        """Send a JSON body or an upload; return the response as soon as its head has arrived.

        `model` is the model name to insert into an upload. Raises BackendError or a subclass.
        """
        ends_at = asyncio.get_running_loop().time() + job.timeouts.total_s
        with _mapped_failures(incomplete(job.timeouts)):
            async with asyncio.timeout_at(ends_at):
                headers, connect_s = self._headers_for(job, "*/*"), job.timeouts.connect_s
                if isinstance(body, bytes):
                    response = await self._send("POST", path, headers, body, connect_s)
                else:
                    head = self._head("POST", path, headers, body.size(model), body.media_type)
                    response = await self._pool.send_upload(head, body.pieces(model), connect_s)
                if response.status != 200:
                    with closing(response):
                        body_read = await _read_body(response)
                    raise self.failures.refusal(response.status, body_read, response.headers)
        return BackendBytes(response, job.timeouts, ends_at)

    def _headers_for(self, job: Job, accept: str) -> str:
        """Return the header lines of a request that belongs to a job."""
        lines = f"Accept: {accept}\r\n"
        if _HEADER_SAFE.fullmatch(job.request_id):
            # With a number appended, because one client request may cause several concurrent generations.
            lines += f"X-Request-Id: {job.request_id}-{next(self._serial)}\r\n"
        if job.trace is not None:
            for name, value in job.trace.headers.items():
                lines += f"{name}: {value}\r\n"
        return lines

    async def get_json(self, path: str, request_body: object = None) -> Any:
        """Request a JSON document of at most `MAX_RESPONSE_BYTES`, within `PROBE_S` seconds.

        Sends `request_body` with POST. If it is None, sends a GET request. Raises BackendError or a subclass.
        """
        method = "GET" if request_body is None else "POST"
        body = b"" if request_body is None else orjson.dumps(request_body)
        not_json = "the backend answered a status request with something other than JSON"
        with _mapped_failures(NO_STATUS.format(limit=seconds(PROBE_S))):
            async with asyncio.timeout(PROBE_S):
                response = await self._send(method, path, ACCEPT_ANY, body, PROBE_S)
                try:
                    return await self._json_of(response, MAX_RESPONSE_BYTES, not_json)
                finally:
                    response.close()

    async def _json_of(self, response: HttpResponse, max_bytes: int, not_json: str) -> Any:
        body = await _read_body(response, max_bytes)
        if response.status != 200:
            raise self.failures.refusal(response.status, body, response.headers)
        if isinstance(body, str):
            raise BackendProtocolError(not_json)
        return body

    async def get_page(self, path: str, within_s: float, max_bytes: int) -> bytes | None:
        """Return the body of a status page, or None if the server does not have this page.

        Raises BackendTimeout after `within_s` seconds, BackendProtocolError if the page has more than `max_bytes`
        bytes, and other subclasses of BackendError.
        """
        with _mapped_failures(NO_STATUS.format(limit=seconds(max(0.0, within_s)))):
            async with asyncio.timeout(within_s):
                response = await self._send("GET", path, ACCEPT_ANY, b"", within_s)
                try:
                    if response.status in NO_PAGE:
                        return None
                    if response.status != 200:
                        raise self.failures.refusal(response.status, await _read_body(response), response.headers)
                    page = bytearray()
                    while read := await response.read(max_bytes):
                        page += read
                        if len(page) > max_bytes:
                            raise BackendProtocolError(
                                f"the backend's status page {path} has more than {max_bytes:,} bytes"
                            )
                    return bytes(page)
                finally:
                    response.close()

    async def aclose(self) -> None:
        """Close all connections.

        Readers of answers that are still open get an exception. May be called repeatedly.
        """
        self._pool.close()

    async def _send(self, method: str, path: str, header_lines: str, body: bytes, connect_s: float) -> HttpResponse:
        """Send a request; return its response as soon as the response head has arrived."""
        return await self._pool.send(self._head(method, path, header_lines, len(body)), body, connect_s)

    def _head(
        self, method: str, path: str, header_lines: str, size: int, media_type: str = "application/json"
    ) -> bytes:
        target = self._targets.get(path)
        if target is None:
            # The cache needs no limit, because a backend has only a few paths.
            target = self._targets[path] = self._base.joinpath(path).raw_path_qs
        if method == "POST":
            header_lines += f"Content-Type: {media_type}\r\nContent-Length: {size}\r\n"
        return f"{method} {target} HTTP/1.1\r\n{self._fixed_lines}{header_lines}\r\n".encode("latin-1")

    async def _expect_events(self, response: HttpResponse, framing: Framing) -> None:
        if response.status != 200:
            body = await _read_body(response)
            raise self.failures.refusal(response.status, body, response.headers)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise BackendProtocolError("the backend compressed its answer although compression was not requested")
        if response.content_type == framing.content_type:
            return
        raise self.failures.not_events(response.content_type, await _read_body(response))


@contextmanager
def _mapped_failures(timeout_message: str) -> Iterator[None]:
    """Convert connection faults to BackendError or a subclass.

    An expired time limit becomes a BackendTimeout with the message `timeout_message`.
    """
    try:
        yield
    except TimeoutError as error:
        raise BackendTimeout(timeout_message) from error
    except CAUGHT as error:
        raise fault(error) from error


async def _read_body(response: HttpResponse, max_bytes: int = MAX_RESPONSE_BYTES) -> object:
    """Read a body up to about `max_bytes`.

    Returns the decoded JSON. If the body is not JSON, returns its beginning as text.
    """
    body = bytearray()
    while len(body) < max_bytes:
        read = await response.read(max_bytes)
        if not read:
            break
        body += read
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[: MAX_DETAIL_LENGTH * 8].decode("utf-8", errors="replace")


def _base(api_base: str | None) -> URL:
    if not api_base:
        raise ConfigError("litellm_params.api_base: missing; set the address of the backend server")
    try:
        url = URL(api_base.rstrip("/").removesuffix("/v1"))
    except ValueError as error:
        raise ConfigError(f"litellm_params.api_base: not a valid URL ({error})") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError("litellm_params.api_base: must begin with http:// or https:// and contain a host")
    # Query and fragment would be lost as soon as a path is appended.
    if url.query_string or url.fragment:
        raise ConfigError("litellm_params.api_base: must not contain `?` or `#`; set only the address of the server")
    return url


def __getattr__(name: str) -> object:
    return renamed(__name__, name, {"Wire": BackendHttp})
