"""Headers sent to a tool server: only permitted headers from the server's own definition.

Three groups are refused by name: the gateway's own headers, hop-by-hop headers, and headers that could mislead a cache,
proxy or browser. The headers of a client's HTTP request never reach a tool server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from unisono.errors import InvalidRequest

MAX_HEADERS: Final = 32
# Bytes of all names and values together.
MAX_BYTES: Final = 8192

# Header token without the underscore. Servers treat `X_Y` as `X-Y`, so one could impersonate the other.
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^`|~-]+")
# Printable ASCII without surrounding blanks; a line break would start another header.
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?|")

RESERVED: Final = frozenset({
    # connection and body, which the gateway describes itself
    "host", "connection", "keep-alive", "upgrade", "te", "trailer", "transfer-encoding", "expect", "range",
    "accept", "accept-encoding", "content-type", "content-length", "content-encoding", "content-md5",
    "http2-settings", "last-event-id", "date", "via", "max-forwards",
    # identity of the caller and of proxies
    "cookie", "cookie2", "set-cookie", "origin", "referer", "user-agent", "forwarded", "x-real-ip", "true-client-ip",
    "x-original-url", "x-rewrite-url", "x-http-method-override", "x-http-method", "x-method-override",
})  # fmt: skip
RESERVED_PREFIXES: Final = ("mcp-", "proxy-", "sec-", "x-forwarded-", "access-control-", "cf-")


def check_headers(headers: Mapping[str, str], authorization: str | None) -> None:
    """Raise `InvalidRequest` if a header is malformed or reserved, or if a limit is exceeded.

    The message never contains the value of a header.
    """
    if len(headers) > MAX_HEADERS:
        raise InvalidRequest(f"A tool server may have at most {MAX_HEADERS} headers, not {len(headers)}; remove some.")
    seen: set[str] = set()
    for name, value in headers.items():
        lower = name.lower()
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                "A header of a tool server has an invalid name. Spaces and underscores are not allowed."
            )
        if lower in RESERVED or lower.startswith(RESERVED_PREFIXES):
            raise InvalidRequest(f"The header {lower!r} is reserved and cannot be set for a tool server.")
        if lower in seen:
            raise InvalidRequest(f"The header {lower!r} is set twice; remove one of them.")
        seen.add(lower)
        if not _VALUE.fullmatch(value):
            raise InvalidRequest(
                f"The value of the header {lower!r} must be printable ASCII without spaces at either end."
            )
    if authorization is not None:
        if "authorization" in seen:
            raise InvalidRequest(
                "Set either `authorization` or an `authorization` header of the tool server, not both."
            )
        if not authorization or not _VALUE.fullmatch(authorization):
            raise InvalidRequest("`authorization` must be printable ASCII, not empty, without spaces at either end.")
    if sum(len(name) + len(value) for name, value in headers.items()) + len(authorization or "") > MAX_BYTES:
        raise InvalidRequest(
            f"The headers of a tool server, `authorization` included, exceed {MAX_BYTES:,} bytes; shorten them."
        )


def outgoing(headers: Mapping[str, str], authorization: str | None) -> dict[str, str]:
    """Return the headers to send to a server.

    If `authorization` contains no space, it is a bare token and is sent with the scheme Bearer. Otherwise it already
    includes a scheme and is sent unchanged.
    """
    check_headers(headers, authorization)
    sent = {name.lower(): value for name, value in headers.items()}
    if authorization is not None:
        sent["authorization"] = authorization if " " in authorization else f"Bearer {authorization}"
    # Answers are read as a stream: a compressed body could expand to gigabytes.
    return sent | {"accept-encoding": "identity", "user-agent": "unisono"}
