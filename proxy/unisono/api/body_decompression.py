"""Decompression of request bodies.

A few compressed kilobytes can expand to gigabytes. Each decompression step therefore returns one piece of limited size,
and the work stops at the first piece that exceeds a limit.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, Protocol

from starlette.types import Message, Receive

from unisono.errors import BodyTooLarge, InvalidRequest

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


def unpacked_body(packed: Receive, coding: str, max_bytes: int) -> Receive:
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
