"""Pool of open MCP sessions: one for each combination of server, credentials and owner.

Sessions are opened on demand and closed when idle.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import httpx2
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken

from unisono.core.tasks import cancel_and_wait
from unisono.core.tool_host import ToolServer, ToolTransport
from unisono.errors import ToolServerUnavailable
from unisono.mcp.admission import admit
from unisono.mcp.fingerprints import key_of
from unisono.mcp.http_transport import Path, default_tls
from unisono.mcp.limits import McpLimits
from unisono.mcp.session import McpSession
from unisono.net.ssrf_guard import SsrfGuard

SWEEP_S: Final = 5.0
TOKENS: Final = 256


@dataclass(slots=True)
class _Tokens:
    """Access token storage that outlives a connection: a new connection needs no new token."""

    tokens: OAuthToken | None = None
    client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


@dataclass(slots=True)
class _PooledSession:
    session: McpSession
    idle_s: float


@dataclass(slots=True)
class SessionPool:
    """Pool of sessions.

    `changed` is called with the key of a server (`key_of`) when the server's tools have, or may have, changed.
    """

    guard: SsrfGuard
    limits: McpLimits
    tls: ssl.SSLContext | None
    changed: Callable[[str], None]
    _sessions: dict[str, _PooledSession] = field(default_factory=dict)
    _retired: set[McpSession] = field(default_factory=set)
    _opening: dict[str, asyncio.Lock] = field(default_factory=dict)
    _tokens: dict[str, _Tokens] = field(default_factory=dict)
    _closing: set[asyncio.Task[None]] = field(default_factory=set)
    _sweeper: asyncio.Task[None] | None = None
    _closed: bool = False

    async def get(self, server: ToolServer) -> McpSession:
        """Return an open connection to `server`.

        Raises `ToolServerNotAllowed` for a forbidden address, and another `ToolServerError` if the connection fails.
        """
        key = key_of(server)
        lock = self._opening.setdefault(key, asyncio.Lock())
        try:
            # Concurrent callers wait for the connection that is already being opened.
            async with lock:
                pooled = self._sessions.get(key)
                if pooled is None or not pooled.session.usable:
                    pooled = await self._start(server, key)
            await pooled.session.open()
        finally:
            if not lock.locked():
                self._opening.pop(key, None)
        return pooled.session

    async def aclose(self) -> None:
        self._closed = True
        await cancel_and_wait(self._sweeper)
        sessions = [pooled.session for pooled in self._sessions.values()] + list(self._retired)
        self._sessions.clear()
        self._retired.clear()
        await asyncio.gather(*(session.aclose() for session in sessions), *self._closing)

    async def _start(self, server: ToolServer, key: str) -> _PooledSession:
        tls = self.tls
        if tls is None and server.transport is not ToolTransport.STDIO:
            # Loading the certificate authorities takes up to a tenth of a second, so it runs in a thread.
            tls = await asyncio.to_thread(default_tls)
        target = await admit(server, self.guard)
        if self._closed:
            raise ToolServerUnavailable("The gateway is shutting down.")
        self._part(key)
        self._make_room()
        issuer = server.oauth.issuer if server.oauth is not None else None
        path = Path(server.url, target, tls, server.timeouts.connect_s, issuer)
        session = McpSession(server, path, self._auth(server, key), self.limits, lambda: self.changed(key))
        pooled = self._sessions[key] = _PooledSession(session, server.timeouts.idle_s)
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.create_task(self._sweep(), name="idle tool servers")
        return pooled

    def _auth(self, server: ToolServer, key: str) -> httpx2.Auth | None:
        oauth = server.oauth
        if oauth is None or server.transport is ToolTransport.STDIO:
            return None
        while len(self._tokens) >= TOKENS:
            del self._tokens[next(iter(self._tokens))]
        return ClientCredentialsOAuthProvider(
            server_url=server.url,
            storage=self._tokens.setdefault(key, _Tokens()),
            client_id=oauth.client_id,
            client_secret=oauth.client_secret,
            issuer=oauth.issuer,
        )

    def _part(self, key: str) -> None:
        """Retire the connection with the key `key`.

        A retired connection accepts no new requests. Requests in progress may finish.
        """
        pooled = self._sessions.pop(key, None)
        if pooled is not None:
            self.changed(key)
            pooled.session.retire()
            self._retired.add(pooled.session)

    def _make_room(self) -> None:
        if len(self._sessions) + len(self._retired) >= self.limits.sessions:
            self._collect()
        if len(self._sessions) + len(self._retired) < self.limits.sessions:
            return
        idle = [key for key, pooled in self._sessions.items() if not pooled.session.busy]
        if not idle:
            raise ToolServerUnavailable(
                "Too many connections to tool servers are in use. Try again later.", retry_after_s=1.0
            )
        self._part(min(idle, key=lambda key: self._sessions[key].session.used_at))
        self._collect()

    async def _sweep(self) -> None:
        """Close idle and retired connections regularly, until no connection is left."""
        loop = asyncio.get_running_loop()
        while self._sessions or self._retired:
            shortest = min((pooled.idle_s for pooled in self._sessions.values()), default=SWEEP_S)
            await asyncio.sleep(min(SWEEP_S, max(shortest / 4, 0.05)))
            for key, pooled in list(self._sessions.items()):
                idle = not pooled.session.busy and loop.time() - pooled.session.used_at > pooled.idle_s
                if idle or not pooled.session.usable:
                    self._part(key)
            self._collect()

    def _collect(self) -> None:
        for session in [session for session in self._retired if session.ended or not session.busy]:
            self._retired.discard(session)
            task = asyncio.create_task(session.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
