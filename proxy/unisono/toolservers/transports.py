"""HTTP and stdio transports of the tool servers.

Addresses other than loopback require a key with every request. Host and Origin headers are checked on loopback, so that
web pages cannot reach the server.
"""

from __future__ import annotations

import hmac
import json
import socket
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import uvicorn
from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp_types import UNSUPPORTED_PROTOCOL_VERSION
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from starlette.types import ASGIApp, Receive, Scope, Send

from unisono.errors import ConfigError
from unisono.net.special_addresses import is_loopback

# MCP server of this package.
ToolServer: TypeAlias = Server[Any]

PATH: Final = "/mcp"
REQUEST_BYTES: Final = 1024 * 1024
SESSIONS: Final = 256
SESSION_IDLE_S: Final = 1800.0
CONNECTIONS: Final = 512
CLOSING_S: Final = 3


class Keyed:
    """ASGI layer that requires a key as `Authorization: Bearer`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = b"Bearer " + key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            authorization = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(authorization, self._expected):
                await _answer(send, 401, b"", ((b"www-authenticate", b"Bearer"),))
                return
        await self._app(scope, receive, send)


class TransportSessions:
    """ASGI layer that restricts a stateful server to protocol revisions with sessions.

    Newer revisions have no sessions and are refused. Clients that support several revisions then fall back to an older
    one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            version = dict(scope["headers"]).get(b"mcp-protocol-version", b"").decode("latin-1")
            if version in MODERN_PROTOCOL_VERSIONS:
                await _answer(send, 400, _refusal(version), ((b"content-type", b"application/json"),))
                return
        await self._app(scope, receive, send)


def _refusal(version: str) -> bytes:
    error = {
        "code": UNSUPPORTED_PROTOCOL_VERSION,
        "message": "This server stores state per session and requires a protocol version with sessions.",
        "data": {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": version},
    }
    return json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()


async def _answer(send: Send, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def application(server: ToolServer, host: str, *, key: str | None = None, remembers: bool = False) -> ASGIApp:
    """Return the server as an ASGI application with the single path `/mcp`.

    `host` is the address on which the application will listen. With `remembers`, protocol revisions without sessions
    are refused. Raises `ConfigError` if other machines can reach `host` and there is no key.
    """
    if key is None and not is_loopback(host):
        raise ConfigError(f"{host}: other machines can reach this address, so a key is required; set --key-variable")
    app: ASGIApp = server.streamable_http_app(
        streamable_http_path=PATH,
        max_request_body_size=REQUEST_BYTES,
        max_sessions=SESSIONS,
        session_idle_timeout=SESSION_IDLE_S,
        # For this host, the SDK accepts loopback names in the Host header and no others.
        host="127.0.0.1" if is_loopback(host) else host,
    )
    if remembers:
        app = TransportSessions(app)
    return app if key is None else Keyed(app, key)


async def serve_http(app: ASGIApp, host: str, port: int, started: Callable[[str], None]) -> None:
    """Serve until a signal arrives. Port 0 selects a free port.

    `started` is called with the URL before the first request. Raises `ConfigError` if the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            # A client that reads the URL may connect before the server accepts its first connection.
            listener.listen(CONNECTIONS)
        except OSError as error:
            raise ConfigError(f"{host}:{port}: {error.strerror or error}") from error
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=CLOSING_S,
        )
        url_host = f"[{host}]" if ":" in host else host
        started(f"http://{url_host}:{listener.getsockname()[1]}{PATH}")
        await uvicorn.Server(config).serve(sockets=[listener])


async def serve_stdio(server: ToolServer) -> None:
    """Serve on standard input and output until the input ends."""
    async with stdio_server() as (inbox, outbox):
        await server.run(inbox, outbox, server.create_initialization_options())
