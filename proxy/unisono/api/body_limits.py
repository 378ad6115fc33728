"""Layer that limits request bodies: media type, size, deadline and decompression.

A few compressed kilobytes can expand to gigabytes. Each decompression step therefore returns one piece of limited size,
and the work stops at the first piece that exceeds a limit.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unisono.api.request_headers import request_headers
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
PIECE_BYTES: Final = 1 << 20
# Maximum ratio of unpacked to packed bytes. JSON with repeated text reaches about 100; a decompression bomb has 1,000
# (gzip) or more.
MAX_RATIO: Final = 250
# Bodies up to this size may have any ratio.
FREE_BYTES: Final = 1 << 20
# Maximum number of gzip members or zstd frames in one body. Encoders write one; each further one costs time.
MAX_MEMBERS: Final = 64
# Binary logarithm of the largest accepted zstd window in bytes: 8 MiB, as in RFC 8878. The decompressor keeps the
# window in memory.
MAX_WINDOW_LOG: Final = 23
# Key in the request's state, which the server sets as soon as the whole body has arrived. The value is the number of
# bytes that were unread at that time, so it is the size of the body only if nothing was read before.
ARRIVED_BYTES: Final = "arrived_bytes"
# Window bits of zlib for the gzip format.
_GZIP: Final = 31


class Member(Protocol):
    """Decompressor for one gzip member or zstd frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /, max_length: int) -> bytes: ...


class ContentCoding(NamedTuple):
    """Format of compressed data.

    `start` creates the decompressor for one member. Its method `decompress` raises `error` for damaged data.
    """

    start: Callable[[], Member]
    error: type[Exception]


def _gzip() -> ContentCoding:
    return ContentCoding(partial(zlib.decompressobj, _GZIP), zlib.error)


def _zstd() -> ContentCoding:
    # Backport of the standard library's module, for Python 3.13 and earlier.
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG}
    return ContentCoding(partial(zstd.ZstdDecompressor, options=options), zstd.ZstdError)


# Supported content codings, each with the function that imports its library.
CODINGS: Final[dict[str, Callable[[], ContentCoding]]] = {"gzip": _gzip, "x-gzip": _gzip, "zstd": _zstd}


class Unpacking:
    """Decompressor for one body with the content coding `coding`, to at most `max_bytes` bytes."""

    # Rules.
    # - `feed` adds packed bytes. The caller then calls `piece` until the result is empty.
    # - After the last packed byte, `finish` checks that the last member is complete.
    # - Bytes after a member must be another member.

    def __init__(self, coding: str, max_bytes: int) -> None:
        self._name = coding
        self._coding = CODINGS[coding]()
        self._max_bytes = max_bytes
        self._member = self._coding.start()
        self._members = 1
        self._waiting = b""
        self._packed = self._unpacked = 0

    def feed(self, data: bytes) -> None:
        self._waiting += data
        self._packed += len(data)

    def piece(self) -> bytes:
        """Return the next unpacked bytes, at most `PIECE_BYTES`; empty if `feed` must add bytes.

        Raises InvalidRequest for damaged data and for too many members. Raises BodyTooLarge if the unpacked size or its
        ratio to the packed size exceeds the limit. A call takes milliseconds, so it should run in a thread.
        """
        while True:
            if self._member.eof:
                if not self._waiting:
                    return b""
                self._start_member()
            data, self._waiting = self._waiting, b""
            try:
                piece = self._member.decompress(data, PIECE_BYTES)
            except self._coding.error as error:
                raise InvalidRequest(
                    f"The body is not valid {self._name} data, although 'Content-Encoding' declares it: {error}."
                ) from None
            # zlib returns the input that it has not processed yet; zstd buffers it.
            unprocessed: bytes = getattr(self._member, "unconsumed_tail", b"")
            self._waiting = self._member.unused_data if self._member.eof else unprocessed
            self._check(len(piece))
            if piece or not self._waiting:
                return piece

    def finish(self) -> None:
        """Raise InvalidRequest if the body ended inside a member."""
        if self._packed and not self._member.eof:
            raise InvalidRequest(f"The body ends before its {self._name} data is complete.")

    def _start_member(self) -> None:
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise InvalidRequest(f"The body has more than {MAX_MEMBERS} {self._name} members; send one.")
        self._member = self._coding.start()

    def _check(self, length: int) -> None:
        self._unpacked += length
        if self._unpacked > self._max_bytes:
            raise BodyTooLarge(f"The unpacked body is larger than {self._max_bytes:,} bytes.")
        if self._unpacked > max(FREE_BYTES, MAX_RATIO * self._packed):
            raise BodyTooLarge(f"The body unpacks to more than {MAX_RATIO} times its size; send it uncompressed.")


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
        coding = _check_headers(scope, max_bytes, is_upload=is_upload)
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

        return self._app(scope, _unpacked(limited, coding, max_bytes) if coding else limited, send)


def _unpacked(packed: Receive, coding: str, max_bytes: int) -> Receive:
    """Return an ASGI `receive` function for the unpacked body.

    Each piece of the body is unpacked in a thread.
    """
    unpacking: Unpacking | None = None
    has_more, complete = True, False

    async def unpacked() -> Message:
        nonlocal unpacking, has_more, complete
        if unpacking is None:
            # The first body with a coding imports the library of the coding, which takes milliseconds.
            unpacking = await asyncio.to_thread(Unpacking, coding, max_bytes)
        while not complete:
            if piece := await asyncio.to_thread(unpacking.piece):
                return {"type": "http.request", "body": piece, "more_body": True}
            if not has_more:
                unpacking.finish()
                complete = True
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await packed()
            if message["type"] != "http.request":
                return message
            has_more = message.get("more_body", False)
            unpacking.feed(message.get("body", b""))
        return await packed()

    return unpacked


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
