"""Responses that consist of one JSON body. The module `sse` contains event streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# Keys, in the request's state, of the server's own `send` and `BodyWriter`. The ASGI layers change only the head of a
# response, so the body of a stream bypasses them.
SEND_BODY = "send_body"
BODY_WRITER = "body_writer"


class BodyWriter(Protocol):
    """Writer for the body of a response. Call `write` only if `is_ready` returns True."""

    def join_head(self) -> None:
        """Write the head of the response together with the first part of the body, not alone.

        Call this method before the head is sent. Each write costs a system call and may wake the client.
        """
        ...

    def is_head_written(self) -> bool:
        """Return whether the head was written. It is never written if the client disconnects first."""
        ...

    def is_ready(self) -> bool: ...

    def write(self, body: bytes) -> None: ...

    def abort(self) -> None:
        """Close the connection before the body is complete."""
        ...


RawHeaders: TypeAlias = list[tuple[bytes, bytes]]


def encoded(headers: Mapping[str, str]) -> RawHeaders:
    """Encode headers for an ASGI message. The names must be in lower case."""
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
