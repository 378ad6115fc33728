"""Tokens of an answer as comments in the stream of the answer, if the request asks for them.

The process that streams the answer also generates it. A separate request for the tokens could reach a different
process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from unisono.api.body_limits import request_headers
from unisono.api.route_table import dependency
from unisono.api.sse import COMMENTS
from unisono.core.live_outputs import LiveOutputs
from unisono.errors import InvalidRequest
from unisono.observe.recording import dumped
from unisono.web.live_tokens import live_segments

# Header with which a streaming request asks for the tokens, and the header's only value.
TOKENS_HEADER: Final = "x-unisono-tokens"
IN_COMMENTS: Final = "comments"
# Name of the header in an ASGI scope.
_TOKENS_HEADER_BYTES: Final = TOKENS_HEADER.encode()


class TokenComments:
    """Layer that adds the tokens of an answer to its stream, if the request asks for them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and (values := request_headers(scope).get(_TOKENS_HEADER_BYTES)):
            if values != [IN_COMMENTS]:
                raise InvalidRequest(
                    f"Invalid value for '{TOKENS_HEADER}': must be '{IN_COMMENTS}'", param=TOKENS_HEADER
                )
            scope["state"][COMMENTS] = partial(_comments, Request(scope))
        return self._app(scope, receive, send)


async def _comments(connection: Request) -> AsyncIterator[bytes]:
    caller = connection.state.caller
    live = dependency(connection, LiveOutputs)
    if (output := live.find(connection.state.request_id, caller.tenant, caller.key)) is not None:
        async for segments in live_segments(output):
            yield b": tokens " + dumped({"segments": segments}) + b"\n\n"
