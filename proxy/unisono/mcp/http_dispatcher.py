"""Requests to a tool server as plain HTTP exchanges, below the SDK's session.

The SDK's transport passes each message through several tasks and queues. A session of protocol version 2026-07-28 does
not need them: the server sends no requests, the client sends no notifications, and closing a response cancels its
request. The SDK's session still builds the requests, checks the results and adds the headers that a tool requires.
"""

from __future__ import annotations

import base64
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, NoReturn

import anyio
import anyio.abc
import httpx2
from httpx2 import EventSource
from mcp.shared.dispatcher import (
    CallOptions,
    Dispatcher,
    OnNotify,
    OnNotifyIntercept,
    OnRequest,
    ProgressFnT,
    as_request_id,
    coerce_request_id,
)
from mcp.shared.exceptions import MCPError
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)
from opentelemetry.propagate import inject
from pydantic import ValidationError
from yarl import URL

from unisono.mcp.http_transport import Path
from unisono.mcp.limits import McpLimits
from unisono.mcp.messages import CALL, Exchange, NoAnswer, encoded
from unisono.mcp.response_filter import (
    EventStreamBody,
    ResponseRefused,
    TrimLimitReached,
    shorten,
    too_large,
    trim,
)
from unisono.net.connection_faults import (
    ConnectFailed,
    ConnectionFault,
    ConnectTimeout,
    InvalidResponse,
    NotSent,
    PoolClosed,
)
from unisono.net.connection_pool import ConnectionPool
from unisono.net.http_response import HttpResponse

log = logging.getLogger(__name__)

READ_BYTES: Final = 64 * 1024
PROGRESS: Final = "notifications/progress"
TOOLS_CHANGED: Final = "notifications/tools/list_changed"
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
# Redirects which mean that the request was not executed. After any other redirect, it may have been executed.
UNEXECUTED_REDIRECTS: Final = frozenset({307, 308})
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
_FIXED_HEADERS: Final = {"accept": f"{JSON}, {EVENTS}", "content-type": JSON}
_UNSENT: Final = (ConnectFailed, ConnectTimeout, PoolClosed, NotSent)
_PROBLEMS: Final[tuple[tuple[type[ConnectionFault], str], ...]] = (
    (ConnectTimeout, "the server accepted no connection within its limit `connect_timeout_s`"),
    (ConnectFailed, "the connection attempt failed"),
    (InvalidResponse, "the answer was not valid HTTP"),
    (ConnectionFault, "the connection was lost"),
)


class Redirected(Exception):
    """The server redirects the request and has not executed it."""


class HttpDispatcher(Dispatcher[TransportContext]):
    """Dispatcher that sends each request to the server at `path` in one HTTP exchange.

    `headers` are sent with each request. `changed` is called when the server reports a change of its tools. `is_stale`
    is set when no connection to the server's addresses could be opened: the next connection has to resolve its name
    again. `was_redirected` is set when the server redirects a request and redirects may be followed.
    """

    def __init__(self, path: Path, headers: Mapping[str, str], limits: McpLimits, changed: Callable[[], None]) -> None:
        # Parsed as the SDK's transport does, so that both send the same path: some servers compare it literally.
        url = httpx2.URL(path.target.url if path.target else path.url)
        self._request = httpx2.Request("POST", url)
        address = URL.build(scheme=url.scheme, host=url.raw_host.decode("ascii"), port=url.port)
        self._pool = ConnectionPool(address, checked=path.target.addresses if path.target else (), tls=path.tls)
        self._connect_s = path.connect_s
        self._limits = limits
        self._changed = changed
        self._ids = itertools.count(1)
        self._may_follow = path.target is None
        lines = {"host": self._request.headers["host"], **headers, **_basic_credentials(url), **_FIXED_HEADERS}
        self._head = f"POST {url.raw_path.decode('ascii')} HTTP/1.1\r\n{_lines(lines)}"
        self.is_stale = False
        self.was_redirected = False

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        """Send a request and return its result.

        Raises `MCPError` for an error of the server or the connection, `NoAnswer` if the answer contains no response to
        the request, and `Redirected` if the server redirects the request without executing it.
        """
        exchange, options = CALL.get() or Exchange(), opts or {}
        request_id, progress = next(self._ids), options.get("on_progress")
        sent = dict(params or {})
        meta = dict(sent.get("_meta") or {})
        if progress is not None:
            meta["progressToken"] = request_id
        inject(meta)
        if meta:
            sent["_meta"] = meta
        message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": sent}
        body = encoded(message, exchange.arguments)
        head = f"{self._head}{_lines(options.get('headers', {}))}content-length: {len(body)}\r\n\r\n"
        # No time limit is needed here, because `McpSession.request` has one.
        answer = await self._exchange(head.encode("latin-1"), body, exchange, request_id, progress)
        if isinstance(answer, JSONRPCError):
            raise MCPError(code=answer.error.code, message=answer.error.message, data=answer.error.data)
        shorten(answer.result, self._limits.entries)
        return answer.result

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        """Send nothing: this protocol version has no notifications of clients over HTTP."""

    async def run(
        self,
        on_request: OnRequest,
        on_notify: OnNotify,
        on_notify_intercept: OnNotifyIntercept | None = None,
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Keep the connections open until cancelled."""
        try:
            task_status.started()
            await anyio.sleep_forever()
        finally:
            self._pool.close()

    async def _exchange(
        self, head: bytes, body: bytes, exchange: Exchange, request_id: int, progress: ProgressFnT | None
    ) -> JSONRPCResponse | JSONRPCError:
        exchange.sent = False
        try:
            connection = await self._pool.connection(self._connect_s)
            # If a deadline or the end of the session interrupts the code above, the request counts as unsent.
            exchange.sent = True
            response = await connection.send(head, body).with_head()
            try:
                exchange.status = response.status
                return await self._answer(response, exchange, request_id, progress)
            finally:
                response.close()
        except ConnectionFault as fault:
            if isinstance(fault, _UNSENT):
                exchange.sent, self.is_stale = False, True
            problem = next(text for kind, text in _PROBLEMS if isinstance(fault, kind))
            self._fail(exchange, problem)
        except ResponseRefused as refusal:
            self._fail(exchange, str(refusal))

    def _fail(self, exchange: Exchange, problem: str) -> NoReturn:
        exchange.problem = exchange.problem or problem
        raise MCPError(INTERNAL_ERROR, f"{exchange.problem[0].upper()}{exchange.problem[1:]}.") from None

    async def _answer(
        self, response: HttpResponse, exchange: Exchange, request_id: int, progress: ProgressFnT | None
    ) -> JSONRPCResponse | JSONRPCError:
        status, kind = response.status, response.content_type
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise ResponseRefused("the answer is compressed although compression was not requested")
        if status in REDIRECTS and "location" in response.headers:
            if status not in UNEXECUTED_REDIRECTS or not self._may_follow:
                raise ResponseRefused("the server sent a redirect, which is not followed")
            self.was_redirected = True
            raise Redirected
        if status >= 400:
            return await self._error(response, exchange)
        if status == 202:
            raise MCPError(INVALID_REQUEST, "The server answered a request with 202 Accepted.")
        if kind.startswith(EVENTS):
            return await self._answer_in_events(response, exchange, request_id, progress)
        if not kind.startswith(JSON):
            raise MCPError(INVALID_REQUEST, f"Unexpected content type: {kind}")
        try:
            message = jsonrpc_message_adapter.validate_json(await self._body(response, exchange), by_name=False)
        except ValidationError as error:
            raise MCPError(PARSE_ERROR, f"Failed to parse JSON response: {error}") from None
        if not isinstance(message, JSONRPCResponse | JSONRPCError) or not _is_same(message.id, request_id):
            raise NoAnswer
        return message

    async def _error(self, response: HttpResponse, exchange: Exchange) -> JSONRPCError:
        """Return the JSON-RPC error in the body. Without one, raise `MCPError` for the HTTP status."""
        if response.content_type.startswith(JSON):
            try:
                body = await self._body(response, exchange)
                message: JSONRPCMessage = jsonrpc_message_adapter.validate_json(body, by_name=False)
            except (ResponseRefused, ValidationError):
                pass
            else:
                if isinstance(message, JSONRPCError):
                    return message
        if response.status == 404:
            raise MCPError(METHOD_NOT_FOUND, "Not Found")
        raise MCPError(INTERNAL_ERROR, "The server returned an error response.")

    async def _answer_in_events(
        self, response: HttpResponse, exchange: Exchange, request_id: int, progress: ProgressFnT | None
    ) -> JSONRPCResponse | JSONRPCError:
        """Read the event stream up to the response and return it. Report progress notifications."""
        body = EventStreamBody(_Chunks(response, exchange, 4 * self._limits.answer_bytes), exchange, self._limits)
        # The server's headers are left out: events are always UTF-8, and httpx2 accepts only ASCII in headers.
        events = httpx2.Response(200, headers={"content-type": EVENTS}, stream=body, request=self._request)
        source = EventSource(events, max_event_size=self._limits.answer_bytes)
        try:
            async for event in source:
                if event.event != "message" or not event.data:
                    continue
                try:
                    message = jsonrpc_message_adapter.validate_json(event.data, by_name=False)
                except ValidationError as error:
                    raise MCPError(PARSE_ERROR, f"Failed to parse SSE message: {error}") from None
                if isinstance(message, JSONRPCResponse | JSONRPCError):
                    return message
                if isinstance(message, JSONRPCNotification):
                    await self._notified(message, request_id, progress)
        except httpx2.SSEError as error:
            raise MCPError(CONNECTION_CLOSED, f"SSE stream failed: {error}") from None
        raise NoAnswer

    async def _notified(self, message: JSONRPCNotification, request_id: int, progress: ProgressFnT | None) -> None:
        if message.method == TOOLS_CHANGED:
            self._changed()
        if message.method == PROGRESS and progress is not None:
            await _report(progress, message.params or {}, request_id)

    async def _body(self, response: HttpResponse, exchange: Exchange) -> bytes:
        """Return the body, trimmed to a size that parses quickly.

        Raises `ResponseRefused` if the body is too large.
        """
        parts = [chunk async for chunk in _Chunks(response, exchange, self._limits.answer_bytes)]
        try:
            return await trim(b"".join(parts), self._limits)
        except TrimLimitReached as error:
            exchange.is_too_large = True
            exchange.problem = too_large(error.limit, "JSON tokens")
            raise ResponseRefused(exchange.problem) from None


class _Chunks(httpx2.AsyncByteStream):
    """Body of at most `most` bytes."""

    def __init__(self, response: HttpResponse, exchange: Exchange, most: int) -> None:
        self._response = response
        self._exchange = exchange
        self._max_bytes = self._remaining = most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self._response.read(READ_BYTES):
            self._remaining -= len(chunk)
            if self._remaining < 0:
                self._exchange.is_too_large = True
                self._exchange.problem = too_large(self._max_bytes)
                raise ResponseRefused(self._exchange.problem)
            yield chunk


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def _basic_credentials(url: httpx2.URL) -> dict[str, str]:
    """Return the header for the user name and the password in a URL, if it has any."""
    if not (url.username or url.password):
        return {}
    credentials = base64.b64encode(f"{url.username}:{url.password}".encode()).decode("ascii")
    return {"authorization": f"Basic {credentials}"}


def _is_same(request_id: object, expected: int) -> bool:
    """Return True if an id from the server is that of our request, as a number or as text."""
    known = as_request_id(request_id)
    return known is not None and coerce_request_id(known) == expected


async def _report(progress: ProgressFnT, params: Mapping[str, Any], request_id: int) -> None:
    """Call `progress` for a valid notification about this request."""
    done, total, text = params.get("progress"), params.get("total"), params.get("message")
    if not _is_same(params.get("progressToken"), request_id):
        return
    if isinstance(done, bool) or not isinstance(done, int | float):
        return
    try:
        await progress(
            float(done),
            float(total) if isinstance(total, int | float) else None,
            text if isinstance(text, str) else None,
        )
    except Exception as error:
        # The call continues although its progress cannot be reported, for example for a number too large for a float.
        log.warning("the progress of a tool call was not reported: %s", type(error).__name__)
