"""Layer that limits request bodies: media type, size and deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unisono.api.body_decompression import CODINGS, unpacked_body
from unisono.api.request_headers import request_headers
from unisono.api.route_table import has_endpoint
from unisono.errors import BodyTimeout, BodyTooLarge, InvalidRequest, UnsupportedMediaType

MAX_BODY_BYTES = 10 * 1024 * 1024
BODY_DEADLINE_S = 60.0
# Paths that accept a form instead of JSON. Their routes check the media type.
UPLOAD_PATHS = frozenset(
    f"{prefix}/audio/{name}" for prefix in ("/v1", "") for name in ("transcriptions", "translations")
)
BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
# Accepted charsets. JSON is always UTF-8; a body in a different charset would be misread.
CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})
# Characters of a client's header that an error message repeats.
MAX_QUOTED_LENGTH = 64
# Key in the request's state, which the server sets as soon as the whole body has arrived. The value is the number of
# bytes that were unread at that time, so it is the size of the body only if nothing was read before.
ARRIVED_BYTES: Final = "arrived_bytes"


class BodyLimits:
    """Layer that limits the media type, size, compression and arrival time of request bodies.

    The whole body must arrive within the deadline, in seconds. The limits for uploads apply to `UPLOAD_PATHS`. The size
    limit applies to the bytes that arrive, regardless of Content-Length, and also to the unpacked bytes.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_bytes: int = MAX_BODY_BYTES,
        deadline_s: float = BODY_DEADLINE_S,
        max_upload_bytes: int = MAX_BODY_BYTES,
        upload_deadline_s: float = BODY_DEADLINE_S,
    ) -> None:
        self._app = app
        self._limits = {False: (max_bytes, deadline_s), True: (max_upload_bytes, upload_deadline_s)}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        is_upload = scope["path"] in UPLOAD_PATHS
        max_bytes, deadline_s = self._limits[is_upload]
        try:
            coding = _check_headers(scope, max_bytes, is_upload=is_upload)
        except UnsupportedMediaType:
            if has_endpoint(scope):
                raise
            # The path or the method is wrong. The application answers with 404 or 405, without reading the body.
            return self._app(scope, receive, send)
        arrived = scope.get("state", {}).get(ARRIVED_BYTES)
        if not coding and arrived is not None and arrived <= max_bytes:
            # The whole body has arrived and is small enough, so no deadline and no count is necessary.
            return self._app(scope, receive, send)
        # The deadline is for the whole body: a client does not extend it by sending single bytes.
        until = asyncio.get_running_loop().time() + deadline_s
        received, complete = 0, False

        async def limited() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                raise BodyTimeout(f"The request body did not arrive within {deadline_s:g} s.") from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > max_bytes:
                raise _too_large(max_bytes)
            return message

        return self._app(scope, unpacked_body(limited, coding, max_bytes) if coding else limited, send)


def _check_headers(scope: Scope, max_bytes: int, *, is_upload: bool) -> str:
    """Check the headers about the body. Return its content coding, "" if it is not compressed.

    Raises InvalidRequest for an invalid Content-Length, BodyTooLarge if Content-Length exceeds `max_bytes`, and
    UnsupportedMediaType for a media type or a coding that is not accepted.
    """
    headers = request_headers(scope)
    length, *others = headers.get(b"content-length", ("0",))
    if not (length.isascii() and length.isdigit()) or others.count(length) != len(others):
        raise InvalidRequest("'Content-Length' must be a single decimal number.")
    if len(length) > 18 or int(length) > max_bytes:
        raise _too_large(max_bytes)
    coding = _coding(encodings) if (encodings := headers.get(b"content-encoding")) else ""
    has_body = int(length) > 0 or b"transfer-encoding" in headers
    types = headers.get(b"content-type", ())
    if scope["method"] in BODY_METHODS and (has_body or types) and not (is_upload or _is_json(types)):
        raise UnsupportedMediaType("The body must be JSON in UTF-8, with 'Content-Type: application/json'.")
    return coding


def _coding(values: Sequence[str]) -> str:
    """Return the content coding in the values of `Content-Encoding`, or "" if there is none.

    Raises UnsupportedMediaType for an unsupported content coding, and for more than one.
    """
    codings = [coding.strip().lower() for coding in values]
    codings = [coding for coding in codings if coding not in {"", "identity"}]
    if len(codings) > 1 or any(coding not in CODINGS for coding in codings):
        raise UnsupportedMediaType(
            f"'Content-Encoding: {', '.join(codings)[:MAX_QUOTED_LENGTH]}' is not supported: use either gzip or "
            "zstd, or send the body uncompressed."
        )
    return codings[0] if codings else ""


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {max_bytes:,} bytes.")


def _is_json(content_types: Sequence[str]) -> bool:
    if len(content_types) != 1:
        return False
    if content_types[0] == "application/json":
        return True
    kind, *parameters = [part.strip().lower() for part in content_types[0].split(";")]
    charsets = [part.partition("=")[2].strip("\"' ") for part in parameters if part.startswith("charset")]
    return kind == "application/json" and all(charset in CHARSETS for charset in charsets)
