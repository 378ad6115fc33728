"""Responses with one JSON body. Event streams are in `sse`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from unisono.api.body_writer import BODY_WRITER, BodyWriter

RawHeaders: TypeAlias = list[tuple[bytes, bytes]]


def encoded(headers: Mapping[str, str]) -> RawHeaders:
    """Return headers as in ASGI messages. The names must be in lower case."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


class WholeResponse(Response):
    """Response with a JSON body, sent in one write."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer: BodyWriter | None = scope.get("state", {}).get(BODY_WRITER)
        if writer is not None:
            writer.join_head()
        await super().__call__(scope, receive, send)

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        # Starlette's method would also search the headers for a type and a length.
        self.raw_headers = [
            *encoded(headers or {}),
            (b"content-length", b"%d" % len(self.body)),
            (b"content-type", b"application/json"),
        ]


def to_whole(body: Mapping[str, Any], headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """Return a response with a JSON body. The values in `body` must have JSON's own types."""
    return WholeResponse(orjson.dumps(body), status, headers)
