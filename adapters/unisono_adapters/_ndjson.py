"""Splitter of newline-delimited JSON from network reads of any size.

It works on bytes, so a character split over two reads is reassembled before decoding. It accepts LF and CRLF
and ignores empty lines.
"""

from __future__ import annotations

# Maximum size of one event in bytes; a larger one is not a valid stream.
MAX_LINE_BYTES = 10 * 1024 * 1024


class EventTooLong(Exception):
    """Line, or data of one event, longer than `MAX_LINE_BYTES`."""


class LineCutter:
    """Splitter from reads to complete lines. Linear in the bytes, however they are split."""

    __slots__ = ("_partial", "_partial_size")

    def __init__(self) -> None:
        self._partial: list[bytes] = []
        self._partial_size = 0

    def feed(self, read: bytes) -> list[bytes]:
        """Return the lines completed by `read`, in order. Raises EventTooLong."""
        lines = read.split(b"\n")
        rest = lines.pop()
        if lines and self._partial:
            lines[0] = b"".join((*self._partial, lines[0]))
            self._partial.clear()
            self._partial_size = 0
        if rest:
            self._partial.append(rest)
            self._partial_size += len(rest)
            if self._partial_size > MAX_LINE_BYTES:
                raise EventTooLong
        return [line for line in (line.strip() for line in lines) if line]

    def end(self) -> list[bytes]:
        """Return the last line, which needs no line end."""
        line = b"".join(self._partial).strip()
        self._partial.clear()
        self._partial_size = 0
        return [line] if line else []
