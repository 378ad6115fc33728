"""Layer for requests of web pages from other origins (CORS)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unisono.api.answer_report import LIMIT_HEADERS
from unisono.api.error_responses import NO_RETRY_HEADER
from unisono.api.request_headers import header_values
from unisono.api.route_table import ANSWER_HEADERS, all_methods

# Headers that a web page may read: those that the vendors' SDKs read, and those in the documentation.
EXPOSED: Final = ", ".join(
    ("x-request-id", "request-id", "retry-after", NO_RETRY_HEADER[0], *ANSWER_HEADERS, *LIMIT_HEADERS)
)


class Cors:
    """Layer that lets web pages from `origins` read responses and send preflight requests."""

    def __init__(self, app: ASGIApp, *, origins: Collection[str] = ()) -> None:
        self._app = app
        self._allowed_origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = header_values(scope, b"origin") if scope["type"] == "http" else ()
        if len(origins) != 1 or self._allowed_origins.isdisjoint((origins[0], "*")):
            await self._app(scope, receive, send)
            return
        origin = origins[0]
        requested_methods = header_values(scope, b"access-control-request-method")
        if scope["method"] == "OPTIONS" and requested_methods:
            await self._preflight(scope, origin, send)
            return

        async def shared(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["access-control-allow-origin"] = origin
                headers["access-control-expose-headers"] = EXPOSED
                headers.add_vary_header("Origin")
            await send(message)

        await self._app(scope, receive, shared)

    @staticmethod
    async def _preflight(scope: Scope, origin: str, send: Send) -> None:
        # SDKs in browsers add headers of their own (x-stainless-*), so a listed origin may send any header.
        requested_headers = ", ".join(header_values(scope, b"access-control-request-headers"))
        headers = [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            # The methods of all routes, so that a page can read the 404 or 405 of any path.
            (b"access-control-allow-methods", ", ".join(all_methods(scope)).encode("latin-1")),
            (
                b"access-control-allow-headers",
                (requested_headers or "authorization, content-type, x-api-key, api-key").encode("latin-1"),
            ),
            (b"access-control-max-age", b"600"),
            (b"vary", b"Origin, Access-Control-Request-Headers"),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
