"""JSON documents one per line, cut out of network reads of any size.

Works on bytes, so a character split over two reads is whole again before anyone decodes it. Accepts LF and CRLF;
empty lines are nothing.
"""

from __future__ import annotations

LONGEST_LINE = 10 * 1024 * 1024
"""Bytes of one event; more is not a stream of ours."""


class EventTooLong(Exception):
    """A line, or the data of one event, passed `LONGEST_LINE`."""


class LineCutter:
    """Feed it reads, get the lines they complete. Linear in the bytes fed, however they are cut."""

    __slots__ = ("_partial", "_partial_size")

    def __init__(self) -> None:
        self._partial: list[bytes] = []
        self._partial_size = 0

    def feed(self, read: bytes) -> list[bytes]:
        """The lines completed by `read`, in order. Raises EventTooLong."""
        lines = read.split(b"\n")
        rest = lines.pop()
        if lines and self._partial:
            lines[0] = b"".join((*self._partial, lines[0]))
            self._partial.clear()
            self._partial_size = 0
        if rest:
            self._partial.append(rest)
            self._partial_size += len(rest)
            if self._partial_size > LONGEST_LINE:
                raise EventTooLong
        return [line for line in (line.strip() for line in lines) if line]

    def end(self) -> list[bytes]:
        """What the stream's end completes: a last line needs no line end."""
        line = b"".join(self._partial).strip()
        self._partial.clear()
        self._partial_size = 0
        return [line] if line else []
