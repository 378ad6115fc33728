"""Checks of request heads, and responses to requests that reach no application.

A request must have only one interpretation. A request that another server could read differently is refused: one with
two hosts, with a target that differs from the Host header, or with transfer codings that are not decoded.

uvicorn with httptools answered 200 to a request with two Host headers, to one without, and to one with the coding
`gzip, chunked`. It also sends chunks to clients of HTTP/1.0. This module refuses the three requests and omits the
chunks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from itertools import chain
from typing import Final
from urllib.parse import unquote

import orjson
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from unisono.api.error_responses import NO_RETRY_HEADER, Formats, format_at, is_permanent
from unisono.api.request_headers import request_headers
from unisono.errors import HeadersTooLarge, MalformedRequest, UnisonoError

MAX_HEADERS: Final = 256
VERSIONS: Final = frozenset({"1.0", "1.1"})
# Number of bytes that a header has in addition to its name and value.
AROUND: Final = len(b": \r\n")
# Absolute form of a request target, as clients send it to a proxy.
AUTHORITY: Final = re.compile(rb"https?://([^/?#]*)/", re.IGNORECASE)
PATH: Final = re.compile(rb"(?:https?://[^/?#]*)?([^?#]*)", re.IGNORECASE)

# Header names are in lower case.
Headers = Sequence[tuple[bytes, bytes]]


def check_head(method: str, target: bytes, version: str, scope: Scope, max_bytes: int) -> None:
    """Validate a request head.

    Raises HeadersTooLarge for too many or too long headers, and MalformedRequest for a request that is ambiguous or not
    supported. `max_bytes` limits the size of the request target and all headers together.
    """
    sent: Headers = scope["headers"]
    if len(sent) > MAX_HEADERS:
        raise HeadersTooLarge(f"The request has more than {MAX_HEADERS} headers; send fewer.")
    if len(target) + AROUND * len(sent) + sum(map(len, chain.from_iterable(sent))) > max_bytes:
        raise HeadersTooLarge(f"The headers are larger than {max_bytes:,} bytes; send fewer or shorter ones.")
    headers = request_headers(scope)
    hosts, codings = headers.get(b"host", ()), headers.get(b"transfer-encoding", ())
    if version not in VERSIONS:
        raise MalformedRequest("The gateway supports only HTTP/1.1 and HTTP/1.0.")
    if method == "CONNECT":
        raise MalformedRequest("The gateway is not a proxy and does not support CONNECT.")
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise MalformedRequest("A request must have exactly one Host header.")
    if codings and (version == "1.0" or _tokens(codings) != [b"chunked"]):
        raise MalformedRequest("The gateway supports only the Transfer-Encoding 'chunked', and only in HTTP/1.1.")
    if target.startswith(b"/") or (method, target) == ("OPTIONS", b"*"):
        return
    authority = AUTHORITY.match(target)
    if authority is None or [authority[1].lower()] != _tokens(hosts):
        raise MalformedRequest("The request target must be a path, or a URL with the host of the Host header.")


def _tokens(values: Sequence[str]) -> list[bytes]:
    # `bytes.strip` removes only ASCII white space, unlike `str.strip`.
    return [value.encode("latin-1").strip().lower() for value in values]


def without_upgrade(method: bytes, target: bytes, version: str, headers: Headers) -> bytes:
    """Rebuild the request head without the request to upgrade to another protocol."""
    closes = any(name == b"connection" and b"close" in value.lower() for name, value in headers)
    lines = [name + b": " + value for name, value in headers if name not in (b"connection", b"upgrade")]
    lines += [b"connection: close"] if closes else []
    return b"\r\n".join([method + b" " + target + b" HTTP/" + version.encode(), *lines, b"", b""])


def path_of(target: bytes) -> str:
    """Return the decoded path of a target, without authority and query, as routes match it."""
    path = PATH.match(target)
    assert path is not None
    return unquote(path[1], "latin-1")


def refusal(error: UnisonoError, target: bytes, formats: Formats) -> bytes:
    """Return the bytes of a complete error response, after which the connection closes.

    The error has the format of the API at the path `target`, which is empty if no request line was received.
    """
    spoken = format_at(path_of(target), formats)
    body = orjson.dumps(spoken.body(error, ""))
    retry = b"retry-after: 1\r\n" if error.status == HTTPStatus.SERVICE_UNAVAILABLE else b""
    if is_permanent(error):
        retry = "{}: {}\r\n".format(*NO_RETRY_HEADER).encode()
    return (
        b"HTTP/1.1 %d %s\r\n" % (error.status, HTTPStatus(error.status).phrase.encode())
        + b"content-type: application/json\r\nconnection: close\r\n"
        + retry
        + b"content-length: %d\r\n\r\n" % len(body)
        + body
    )


def end_body_by_closing(cycle: RequestResponseCycle) -> None:
    """End a response without a length by closing the connection, because HTTP/1.0 has no chunks."""
    cycle.chunked_encoding = False
    send = cycle.send

    async def plain(message: object) -> None:
        if isinstance(message, dict) and message["type"] == "http.response.body":
            # Without chunks, uvicorn writes only the number of bytes that it expects.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)  # type: ignore[arg-type]

    cycle.send = plain  # type: ignore[method-assign]


def close_unless_continued(cycle: RequestResponseCycle) -> None:
    """Close the connection after a response if the client still waits for `100 Continue`.

    The client may then omit the body, and the next request would be read as this body.
    """
    send = cycle.send

    async def closing(message: object) -> None:
        if cycle.waiting_for_100_continue:
            cycle.keep_alive = False
        await send(message)  # type: ignore[arg-type]

    cycle.send = closing  # type: ignore[method-assign]
