"""Connection to one tool server, opened, maintained and closed by a task of its own.

The SDK's cancel scopes must be left by the task that entered them, so only this task enters them. Each request also
runs in its own task, which the caller may abandon at any moment. A failure here affects this server only.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar

import anyio
import httpx2
from mcp.client import Client, ClientRequestContext, ClientSession
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types import (
    HEADER_MISMATCH,
    INVALID_PARAMS,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    PARSE_ERROR,
    ElicitRequestParams,
    ElicitResult,
    Implementation,
    ToolListChangedNotification,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from unisono.core.tool_host import ToolServer, ToolTransport
from unisono.mcp.connection_errors import connection_error, kinds_of
from unisono.mcp.headers import outgoing
from unisono.mcp.http_dispatcher import HttpDispatcher, Redirected
from unisono.mcp.http_transport import Outgoing, Path
from unisono.mcp.limits import McpLimits
from unisono.mcp.messages import CALL, Exchange, NoAnswer
from unisono.mcp.running_dialogues import RunningDialogues
from unisono.mcp.stdio import process
from unisono.mcp.stream_bridge import ReadStream, WatchedTransport, WriteStream

log = logging.getLogger(__name__)

# The SDK logs messages, tokens and addresses. This module logs what an operator needs. The logger of the SDK's module
# `mcp.client.session` has the name `client`.
for _talkative in ("mcp", "client", "httpx2", "httpcore2"):
    logging.getLogger(_talkative).setLevel(logging.CRITICAL)

T = TypeVar("T")

ANSWER_GRACE_S: Final = 0.5
# Number of event loop iterations between the end of an answer's body and the decision that the request got no answer.
# They begin after `ANSWER_GRACE_S`, because on a busy event loop an answer may take longer to reach its caller.
ANSWER_GRACE_ITERATIONS: Final = 1000

# Error codes that a server with the negotiated protocol version sends with HTTP status 400.
CURRENT_ERRORS: Final = frozenset({HEADER_MISMATCH, INVALID_PARAMS, MISSING_REQUIRED_CLIENT_CAPABILITY, PARSE_ERROR})

CLIENT: Final = Implementation(name="unisono", version="1")
MAX_RELISTEN_PAUSE_S: Final = 60.0


class McpSession:
    """Connection that is ready after `open`.

    `changed` is called whenever the server reports a change of its tools.
    """

    def __init__(
        self, server: ToolServer, path: Path, auth: httpx2.Auth | None, limits: McpLimits, changed: Callable[[], None]
    ) -> None:
        self._server = server
        self._path = path
        self._auth = auth
        self._limits = limits
        self._changed = changed
        self._stop = asyncio.Event()
        self._ended = asyncio.Event()
        self._is_retired = False
        self._requests: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._running: set[asyncio.Task[Any]] = set()
        self._http: Outgoing | None = None
        self._client: Client | None = None
        self._direct: HttpDispatcher | None = None  # for requests that need no transport of the SDK
        self._opening = Exchange()
        self.dialogues = RunningDialogues()
        self._scope = anyio.CancelScope()
        self._task = asyncio.create_task(self._live(), name=f"tool server {server.label}")
        self.used_at = asyncio.get_running_loop().time()

    @property
    def usable(self) -> bool:
        """Return True if the session accepts new requests."""
        stale = any(sender is not None and sender.is_stale for sender in (self._http, self._direct))
        return not (self._is_retired or self._stop.is_set() or self._ended.is_set() or stale)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def busy(self) -> bool:
        return bool(self._running) or not self._requests.done()

    def retire(self) -> None:
        """Make the session unusable for new requests. Requests in progress may finish."""
        self._is_retired = True

    async def open(self) -> None:
        """Wait until the connection is established.

        Raises `ToolServerError` or a subclass if this fails.
        """
        await asyncio.shield(self._requests)

    async def request(self, work: Callable[[ClientSession], Awaitable[T]], exchange: Exchange, deadline: float) -> T:
        """Run `work` in its own task and return its result.

        Raises errors of the SDK, `TimeoutError` at `deadline` (time of the event loop), and `NoAnswer` if the server's
        answer contains no response. A cancellation takes effect immediately: the server is notified and the connection
        is released in the background.
        """
        session = await asyncio.shield(self._requests)
        context = contextvars.copy_context()
        context.run(CALL.set, exchange)
        task = asyncio.create_task(self._run(work, session, exchange), context=context)
        self._running.add(task)
        task.add_done_callback(self._finished)
        loop = asyncio.get_running_loop()
        if self._server.transport is ToolTransport.STREAMABLE_HTTP:
            exchange.on_complete = lambda: loop.call_later(ANSWER_GRACE_S, _give_up, task, exchange)
        elif self._server.transport is ToolTransport.SSE:
            # The answer arrives on a different stream. A message with an error status gets no answer there.
            exchange.on_complete = lambda: exchange.status >= 300 and task.cancel()
        try:
            done, _ = await asyncio.wait({task}, timeout=max(deadline - loop.time(), 0.0))
        except asyncio.CancelledError:
            _abort_task(task, exchange)
            raise
        if not done:
            _abort_task(task, exchange)
            raise TimeoutError
        if task.cancelled():
            # A message that is still unsent must not be sent later, because its call is reported as not executed.
            exchange.abort()
            raise NoAnswer
        return task.result()

    async def _run(
        self, work: Callable[[ClientSession], Awaitable[T]], session: ClientSession, exchange: Exchange
    ) -> T:
        try:
            if self._direct is None or not self._direct.was_redirected:
                with suppress(Redirected):
                    return await work(session)
            # The SDK's transport follows permitted redirects. The redirected request was not executed.
            exchange.sent, exchange.status = False, 0
            assert self._client is not None
            return await work(self._client.session)
        except MCPError as error:
            is_current = session.protocol_version in MODERN_PROTOCOL_VERSIONS
            if is_current and exchange.status == 400 and error.code not in CURRENT_ERRORS:
                # The server may have been replaced by one that supports only older protocol versions.
                self.retire()
            raise

    async def _on_question(self, context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        return await self.dialogues.reply(params)

    async def aclose(self) -> None:
        """Close the connection within a short timeout, and wait until all of it is released."""
        self._stop.set()
        if not self._requests.done():
            # A session that is still connecting does not check the event.
            self._scope.cancel()
        done, _ = await asyncio.wait({self._task}, timeout=3 * self._limits.closing_s + 3)
        if not done:
            self._task.cancel()
        for task in self._running:
            task.cancel()
        await asyncio.gather(self._task, *self._running, return_exceptions=True)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self.used_at = asyncio.get_running_loop().time()
        if not task.cancelled():
            task.exception()  # marks it as retrieved, because the caller may no longer wait

    async def _live(self) -> None:
        """Open the connection, maintain it until it ends or `aclose` is called, then close it."""
        scope = self._scope
        scope.deadline = anyio.current_time() + self._server.timeouts.connect_s
        failure: BaseException | None = None
        try:
            with scope:
                # The SDK's handshakes are ordinary requests; their record explains a failed connection.
                CALL.set(self._opening)
                async with self._connected() as client, self._session_for_requests(client) as session:
                    scope.deadline = float("inf")
                    self._requests.set_result(session)
                    await self._maintain(client)
                    scope.deadline = anyio.current_time() + self._limits.closing_s
        except Exception as error:
            failure = error
        finally:
            self._ended.set()
            if not self._requests.done():
                self._requests.set_exception(
                    connection_error(self._server, self._opening, failure, is_stopped=self._stop.is_set())
                )
                self._requests.exception()  # marks it as retrieved, because no caller may wait
        if failure is not None:
            log.info(
                "the connection to a tool server failed: %s",
                kinds_of(failure),
                extra={"tool_server": self._server.label},
            )

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        client = Client(
            WatchedTransport(
                self._transport(),
                self._stop,
                entries=self._limits.entries,
            ),
            # The SSE transport is older than the newer handshake.
            mode="legacy" if self._server.transport is ToolTransport.SSE else "auto",
            # The connection timeout bounds the handshake, and the caller's deadline bounds a list.
            read_timeout_seconds=self._server.timeouts.connect_s + self._server.timeouts.list_s,
            client_info=CLIENT,
            message_handler=self._on_message,
            elicitation_callback=self._on_question if self._server.may_ask else None,
            cache=None,
        )
        async with client:
            self._client = client
            yield client

    @asynccontextmanager
    async def _session_for_requests(self, client: Client) -> AsyncIterator[ClientSession]:
        """Provide the session that sends requests to list tools and to call them.

        This is either the client's own session, or a session with `HttpDispatcher` instead of the SDK's transport. Only
        the client's own session follows redirects, gets access tokens, and supports older versions of the protocol.
        """
        server, negotiated = self._server, client.session.discover_result
        if (
            server.transport is not ToolTransport.STREAMABLE_HTTP
            or negotiated is None
            or self._auth is not None
            or self._http is None
            or self._http.was_redirected
        ):
            yield client.session
            return
        path, headers = self._path, outgoing(server.headers, server.authorization)
        self._direct = HttpDispatcher(path, headers, self._limits, self._changed)
        async with ClientSession(
            dispatcher=self._direct,
            client_info=CLIENT,
            elicitation_callback=self._on_question if server.may_ask else None,
        ) as session:
            session.adopt(negotiated)
            yield session

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[tuple[ReadStream, WriteStream]]:
        server, limits = self._server, self._limits
        if server.transport is ToolTransport.STDIO:
            assert server.command is not None
            async with process(server.command, server.label, limits) as streams:
                yield streams[0], streams[1]
            return
        url = self._path.target.url if self._path.target else self._path.url
        headers = outgoing(server.headers, server.authorization)
        if server.transport is ToolTransport.SSE:

            def client(
                headers: dict[str, str] | None = None,
                timeout: httpx2.Timeout | None = None,
                auth: httpx2.Auth | None = None,
            ) -> httpx2.AsyncClient:
                self._http = Outgoing(self._path, limits, fragile=True, headers=headers, auth=auth)
                return self._http

            async with sse_client(url, headers, httpx_client_factory=client, auth=self._auth) as (inbox, outbox):
                yield inbox, outbox
            return
        async with (
            Outgoing(self._path, limits, fragile=False, headers=headers, auth=self._auth) as self._http,
            streamable_http_client(url, http_client=self._http, max_sse_event_size=limits.answer_bytes) as (
                inbox,
                outbox,
            ),
        ):
            yield inbox, outbox

    async def _maintain(self, client: Client) -> None:
        """Maintain the connection until it ends, and listen for changes of the server's tools."""
        capabilities = client.server_capabilities.tools
        listening = (
            client.protocol_version in MODERN_PROTOCOL_VERSIONS
            and capabilities is not None
            and capabilities.list_changed
        )
        async with anyio.create_task_group() as group:
            if listening:
                group.start_soon(self._listen, client)
            if self._http is not None:
                group.start_soon(self._wait_until_broken, self._http)
            await self._stop.wait()
            group.cancel_scope.cancel()

    async def _wait_until_broken(self, http: Outgoing) -> None:
        await http.has_broken.wait()
        self._stop.set()

    async def _listen(self, client: Client) -> None:
        """Subscribe to changes of the tools, as newer servers require.

        If this fails, cached tool lists only expire by age.
        """
        pause_s = self._limits.reconnect_s
        while True:
            # This request stays open, so it must not use the record of the handshake.
            CALL.set(None)
            try:
                async with client.listen(tools_list_changed=True) as changes:
                    if not changes.honored.tools_list_changed:
                        return
                    async for _ in changes:
                        pause_s = self._limits.reconnect_s
                        self._changed()
            except (MCPError, TimeoutError):
                return
            except SubscriptionLost:
                # The server does not report changes that happened during the interruption, so a change is assumed.
                self._changed()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RELISTEN_PAUSE_S)

    async def _on_message(self, message: Any) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._changed()


def _abort_task(task: asyncio.Task[Any], exchange: Exchange) -> None:
    # The SDK notifies the server on cancellation; the connection does not wait for the answer.
    task.cancel()
    exchange.abort()


def _give_up(task: asyncio.Task[Any], exchange: Exchange, iterations: int = ANSWER_GRACE_ITERATIONS) -> None:
    if task.done() or not exchange.ended:
        return
    if iterations:
        asyncio.get_running_loop().call_soon(_give_up, task, exchange, iterations - 1)
    else:
        task.cancel()
