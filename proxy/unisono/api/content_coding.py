"""Decompression of request bodies (gzip and zstd), bounded in size, ratio and members.

A few kilobytes can stand for gigabytes. Each call therefore returns one piece of limited size, and the work stops at
the first piece that exceeds a limit.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from unisono.errors import BodyTooLarge, InvalidRequest

if sys.version_info >= (3, 14):
    from compression.zstd import DecompressionParameter, ZstdDecompressor, ZstdError
else:
    # The same module as in the standard library of 3.14, so that this dependency ends with Python 3.13.
    from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

PIECE_BYTES: Final = 1 << 20
# JSON of repeated text reaches a ratio of about 100. A bomb has 1,000 (gzip) and more.
MAX_RATIO: Final = 250
# Bodies up to this size may have any ratio.
FREE_BYTES: Final = 1 << 20
# Concatenated gzip members or zstd frames. Encoders write one; each has a cost of its own.
MAX_MEMBERS: Final = 64
# Binary logarithm of the largest zstd window, which is the memory of a decompression: 8 MiB, as in RFC 8878.
MAX_WINDOW_LOG: Final = 23
# Window bits of zlib for the gzip format.
_GZIP: Final = 31


class Member(Protocol):
    """Decompressor of one gzip member or zstd frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class GzipMember:
    """Decompressor of one gzip member, with the interface of `ZstdDecompressor`."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(_GZIP)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        # zlib returns the input that it has not processed yet; zstd buffers it.
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)


def _zstd_frame() -> ZstdDecompressor:
    return ZstdDecompressor(options={DecompressionParameter.window_log_max: MAX_WINDOW_LOG})


# Supported codings, each with a factory of its members.
CODINGS: Final[Mapping[str, Callable[[], Member]]] = {"gzip": GzipMember, "x-gzip": GzipMember, "zstd": _zstd_frame}


class Unpacking:
    """Decompression of one body of the coding `coding`, to at most `max_bytes`."""

    # Rules.
    # - `feed` adds packed bytes. Then `piece` is called until it returns nothing.
    # - After the last packed byte, `finish` checks that the last member is complete.
    # - Bytes after a member must be another member.

    def __init__(self, coding: str, max_bytes: int) -> None:
        self._coding = coding
        self._max_bytes = max_bytes
        self._member = CODINGS[coding]()
        self._members = 1
        self._waiting = b""
        self._packed = self._unpacked = 0

    def feed(self, data: bytes) -> None:
        self._waiting += data
        self._packed += len(data)

    def piece(self) -> bytes:
        """Return the next unpacked bytes, at most `PIECE_BYTES`; empty if there are none yet.

        Raises InvalidRequest for damaged data, and BodyTooLarge above a limit. Takes milliseconds.
        """
        while True:
            if self._member.eof:
                if not self._waiting:
                    return b""
                self._start_member()
            data, self._waiting = self._waiting, b""
            try:
                piece = self._member.decompress(data, PIECE_BYTES)
            except (zlib.error, ZstdError) as error:
                raise InvalidRequest(
                    f"The body is not valid {self._coding} data, as 'Content-Encoding' says: {error}."
                ) from None
            if self._member.eof:
                self._waiting = self._member.unused_data
            self._check(len(piece))
            if piece or not self._waiting:
                return piece

    def finish(self) -> None:
        """Raise InvalidRequest if the body ended inside a member."""
        if self._packed and not self._member.eof:
            raise InvalidRequest(f"The body ends before its {self._coding} data is complete.")

    def _start_member(self) -> None:
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise InvalidRequest(f"The body has more than {MAX_MEMBERS} {self._coding} members; send one.")
        self._member = CODINGS[self._coding]()

    def _check(self, length: int) -> None:
        self._unpacked += length
        if self._unpacked > self._max_bytes:
            raise BodyTooLarge(f"The unpacked body is larger than {self._max_bytes:,} bytes.")
        if self._unpacked > max(FREE_BYTES, MAX_RATIO * self._packed):
            raise BodyTooLarge(f"The body unpacks to more than {MAX_RATIO} times its size; send it uncompressed.")
