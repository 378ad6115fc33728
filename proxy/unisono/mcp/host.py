"""Implementation of `core.tool_host.ToolHost` with MCP: tools on remote servers.

A tool list is cached until its server reports a change or the list expires. A call waits for a slot at its server. The
time of a call and the sizes of its arguments and its result are limited. A call always returns an outcome. It is
repeated once if the server provably did not execute it, and never otherwise.
"""

from __future__ import annotations

import asyncio
import importlib
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from unisono.core.error_texts import seconds
from unisono.core.server_tool_arguments import ToolArguments
from unisono.core.tool_host import (
    TALK,
    HostedTool,
    LeftOutTool,
    Progress,
    ToolHost,
    ToolList,
    ToolOutcome,
    ToolServer,
    ToolTransport,
    UserAnswer,
)
from unisono.errors import (
    InvalidRequest,
    ToolServerError,
    ToolServerNotAllowed,
    ToolServerTimeout,
    ToolServerUnavailable,
)
from unisono.mcp.admission import NOT_ALLOWED
from unisono.mcp.fair_queue import FairQueue, NoSlot
from unisono.mcp.fingerprints import digest_of, key_of, server_key, split_by_name
from unisono.mcp.headers import check_headers
from unisono.mcp.limits import McpLimits
from unisono.net.ssrf_guard import SsrfGuard

if TYPE_CHECKING:
    from unisono.mcp.session_pool import SessionPool

# Maximum number of servers whose lists are cached.
LISTS: Final = 512


@dataclass(slots=True)
class _Listed:
    tools: tuple[HostedTool, ...]
    left_out: tuple[LeftOutTool, ...]
    valid_until: float


@dataclass(slots=True)
class McpHost(ToolHost):
    """Tool servers of the configuration, and those named in requests if `guard` permits them.

    `tls` is the TLS context that verifies servers; by default it trusts the system's certificate authorities.
    Connections are opened at first use.
    """

    guard: SsrfGuard = field(default_factory=SsrfGuard)
    limits: McpLimits = field(default_factory=McpLimits)
    tls: ssl.SSLContext | None = None
    _sessions: SessionPool | None = None
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _lists: OrderedDict[str, _Listed] = field(default_factory=OrderedDict)
    _changes: dict[str, int] = field(default_factory=dict)
    _listing: dict[str, asyncio.Lock] = field(default_factory=dict)
    _lines: dict[str, FairQueue] = field(default_factory=dict)
    _closed: bool = False

    async def start(self) -> None:
        """See `ToolHost.start`."""
        await self._open_sessions()

    async def list_tools(self, server: ToolServer, *, deadline: float | None = None) -> ToolList:
        """See `ToolHost.list_tools`."""
        self._check(server)
        # One deadline for connection, handshake and all pages: a server that drips bytes cannot extend it.
        until, within = _limit(server, "list_timeout_s", server.timeouts.list_s, deadline)
        try:
            async with asyncio.timeout_at(until):
                listed = await self._list_entry(server, until)
        except TimeoutError:
            raise ToolServerTimeout(f"The tool server {server.label!r} did not list its tools {within}.") from None
        usable = tuple(tool for tool in listed.tools if server.allowed is None or server.allowed.matches(tool))
        left_out = (each for each in listed.left_out if server.allowed is None or server.allowed.matches(each.tool))
        return ToolList(usable, digest_of(usable), tuple(left_out))

    async def call(
        self,
        server: ToolServer,
        tool: str,
        arguments: ToolArguments,
        *,
        deadline: float | None = None,
        progress: Progress | None = None,
        answer: UserAnswer | None = None,
        can_ask: bool = False,
    ) -> ToolOutcome:
        """See `ToolHost.call`."""
        self._check(server)
        size = len(arguments.text.encode())
        if size > self.limits.arguments_bytes:
            return _failed(
                f"The arguments have {size:,} bytes; the limit is {self.limits.arguments_bytes:,}. Shorten them."
            )
        until, within = _limit(server, "timeout", server.timeouts.call_s, deadline)
        can_ask = can_ask and server.may_ask
        try:
            async with self._slot(server, until):
                return await self._call(server, tool, arguments, until, within, progress, answer, can_ask)
        except (ToolServerError, NoSlot) as error:
            return _failed(str(error))
        except TimeoutError:
            return _failed(f"The tool server was not ready {within}.")

    async def aclose(self) -> None:
        """See `ToolHost.aclose`."""
        self._closed = True
        async with self._loading:
            if self._sessions is not None:
                await self._sessions.aclose()

    def _check(self, server: ToolServer) -> None:
        """Raise an error if the definition of the server is invalid, or not permitted in a request."""
        check_headers(server.headers, server.authorization)
        stdio = server.transport is ToolTransport.STDIO
        if not server.configured and (stdio or server.command is not None or server.oauth is not None):
            # Only the operator may configure commands, and the OAuth servers that receive secrets.
            raise ToolServerNotAllowed(NOT_ALLOWED)
        if stdio != (server.command is not None) or stdio == bool(server.url):
            raise InvalidRequest(f"The tool server {server.label!r} needs either a URL or a command.")
        if server.oauth is not None and server.authorization is not None:
            raise InvalidRequest(f"The tool server {server.label!r} has both `authorization` and OAuth; set one.")

    async def _list_entry(self, server: ToolServer, until: float) -> _Listed:
        loop = asyncio.get_running_loop()
        key = key_of(server)
        lock = self._listing.setdefault(key, asyncio.Lock())
        try:
            # Concurrent callers wait for the list that is already being fetched.
            async with lock:
                known = self._lists.get(key)
                if known is not None and known.valid_until > loop.time():
                    self._lists.move_to_end(key)
                    return known
                return await self._list_tools(server, key, until)
        finally:
            if not lock.locked():
                self._listing.pop(key, None)
                self._changes.pop(key, None)

    async def _list_tools(self, server: ToolServer, key: str, until: float) -> _Listed:
        sessions = await self._open_sessions()
        from unisono.mcp import calls

        session = await sessions.get(server)
        before = self._changes.get(key, 0)
        found, invalid = await calls.tools(session, server, self.limits, until)
        tools, left_out = split_by_name(found)
        listed = _Listed(tools, left_out + invalid, asyncio.get_running_loop().time() + self.limits.list_ttl_s)
        # A list that changed while it was read may be inconsistent: do not cache it.
        if self._changes.get(key, 0) == before:
            self._lists[key] = listed
            while len(self._lists) > LISTS:
                self._forget(next(iter(self._lists)))
        return listed

    async def _call(
        self,
        server: ToolServer,
        tool: str,
        arguments: ToolArguments,
        until: float,
        within: str,
        progress: Progress | None,
        answer: UserAnswer | None,
        can_ask: bool,
    ) -> ToolOutcome:
        async with asyncio.timeout_at(until):
            sessions = await self._open_sessions()
            if server.allowed is not None:
                tools = (await self._list_entry(server, until)).tools
                if not any(listed.name == tool and server.allowed.matches(listed) for listed in tools):
                    return _failed(f"The tool {tool!r} does not exist on this server or is not allowed.")
            session = await sessions.get(server)
        from unisono.mcp import calls

        made = calls.Call(tool, arguments, until, within, progress, answer, can_ask)
        result = await calls.call(session, made, self.limits)
        if result.can_repeat:
            # The server never saw the call, so a second one on a new connection cannot run it twice.
            session.retire()
            async with asyncio.timeout_at(until):
                session = await sessions.get(server)
            result = await calls.call(session, made, self.limits)
        return result.outcome

    @asynccontextmanager
    async def _slot(self, server: ToolServer, until: float) -> AsyncIterator[None]:
        """Acquire one of the slots at `server`, which all callers share.

        Raises `NoSlot` if no slot is free by `until` (monotonic time) or the queue is full.
        """
        key = server_key(server)
        line = self._lines.setdefault(key, FairQueue(server.concurrent, self.limits.waiting))
        try:
            async with line.slot(server.owner.partition(TALK)[0], until):
                yield
        finally:
            # A queue exists only while it is used; requests may name any number of servers.
            if not line.users:
                self._lines.pop(key, None)

    async def _open_sessions(self) -> SessionPool:
        """Create the session pool; the first call loads the SDK, which takes a while."""
        if self._sessions is None:
            async with self._loading:
                if self._closed:
                    raise ToolServerUnavailable("The gateway is shutting down.")
                if self._sessions is None:
                    for name in ("session_pool", "calls"):
                        await asyncio.to_thread(importlib.import_module, f"unisono.mcp.{name}")
                    from unisono.mcp.session_pool import SessionPool

                    self._sessions = SessionPool(self.guard, self.limits, self.tls, self._forget)
        return self._sessions

    def _forget(self, key: str) -> None:
        """Drop the cached tool list of the server with this key. Its tools are then listed again."""
        self._lists.pop(key, None)
        if key in self._listing:
            self._changes[key] = self._changes.get(key, 0) + 1


def _limit(server: ToolServer, setting: str, limit_s: float, deadline: float | None) -> tuple[float, str]:
    """Return the end time of an exchange, and text that ends an error message about this limit.

    `setting` is the name of the option that sets `limit_s`. `deadline` is the caller's own limit, or None. Both times
    are those of the event loop.
    """
    now = asyncio.get_running_loop().time()
    # The factor excludes a caller that has just computed its deadline from `limit_s` itself.
    if deadline is not None and deadline < now + 0.9 * limit_s:
        left_s = max(0.0, deadline - now)
        return deadline, f"within {seconds(left_s)}, the time left for the server tools of this answer"
    until = now + limit_s if deadline is None else min(now + limit_s, deadline)
    remedy = f"; the operator can check the server, or raise its `{setting}`" if server.configured else ""
    return until, f"within {seconds(limit_s)}{remedy}"


def _failed(text: str) -> ToolOutcome:
    return ToolOutcome(text, is_error=True)
