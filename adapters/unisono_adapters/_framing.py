"""Framing of an event stream: its content type and its splitter."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import repeat
from operator import contains
from typing import Final, Protocol

from unisono.core.frozen import dataclass

# Splitter of newline-delimited JSON from network reads of any size.
#
# It works on bytes, so a character split over two reads is reassembled before decoding. It accepts LF and CRLF and
# ignores empty lines.

# Maximum size of one event in bytes; a larger one is not a valid stream.
MAX_LINE_BYTES = 10 * 1024 * 1024

# Bytes as numbers. For `b"\r" in data`, Python first tries the needle as a number and formats an error: about 3,800
# machine instructions instead of 100.
CR: Final = 0x0D
LF: Final = 0x0A

# Line of a comment, or its beginning.
COMMENT: Final = re.compile(rb"^:.*\n?", re.MULTILINE)


class EventTooLong(Exception):
    """Line or event longer than `MAX_LINE_BYTES`."""


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


# Splitter of server-sent events from network reads of any size.
#
# It works on bytes, so a character split over two reads is reassembled before decoding. It accepts LF, CR, CRLF and
# any mix of them, a byte order mark, comments and unknown fields. It joins an event's `data:` lines as the standard
# requires.


class EventCutter:
    """Splitter from reads to the data of complete events.

    Linear in the bytes, however they are split. Comments, which servers send to keep a connection open, take no memory.
    """

    __slots__ = ("_first", "_in_comment", "_partial", "_partial_size", "_skip_newline")

    def __init__(self) -> None:
        # Bytes of the incomplete event, with LF as its only line end.
        self._partial: list[bytes] = []
        self._partial_size = 0
        self._skip_newline = False
        self._in_comment = False  # the incomplete line is a comment; its beginning was dropped
        self._first = True

    def feed(self, read: bytes) -> list[bytes]:
        """Return the data of the events completed by `read`, in order. Raises EventTooLong."""
        if self._skip_newline or CR in read:
            read = self._with_newlines(read)
        if self._in_comment:
            _, end, read = read.partition(b"\n")
            self._in_comment = not end
        partial = self._partial
        events, blank_line, rest = read.rpartition(b"\n\n")
        if not blank_line and not (partial and read.startswith(b"\n") and partial[-1].endswith(b"\n")):
            if read := self._without_comments(read):
                partial.append(read)
                self._partial_size += len(read)
                if self._partial_size > MAX_LINE_BYTES:
                    raise EventTooLong
            return []
        if partial:
            events, _, rest = b"".join((*partial, read)).rpartition(b"\n\n")
            partial.clear()
        if rest:
            partial.append(rest)
        self._partial_size = len(rest)
        # Fast path for events with one `data:` line each, usually a single one.
        if events.startswith(b"data: "):
            if LF not in events:
                self._first = False
                return [events[6:]]
            data = events[6:].split(b"\n\ndata: ")
            if not any(map(contains, data, repeat(LF))):
                self._first = False
                return data
        return self._split(events)

    def end(self) -> list[bytes]:
        """Return the last events: an event without its blank line still counts."""
        events = b"".join(self._partial)
        self._partial.clear()
        self._partial_size = 0
        return self._split(events)

    def _with_newlines(self, read: bytes) -> bytes:
        """Return `read` with each line end as LF."""
        if self._skip_newline and read:
            # The previous read ended in CR, which ended its line: a following LF belongs to it.
            self._skip_newline = False
            read = read.removeprefix(b"\n")
        if CR in read:
            self._skip_newline = read.endswith(b"\r")
            read = read.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return read

    def _without_comments(self, read: bytes) -> bytes:
        """Return part of an incomplete event without its comments."""
        line_rest = b""
        if self._partial and not self._partial[-1].endswith(b"\n"):
            # The first line continues the last one of the part before.
            line_rest, end, read = read.partition(b"\n")
            line_rest += end
        if not read.startswith(b":") and b"\n:" not in read:
            return line_rest + read
        self._in_comment = read.rpartition(b"\n")[2].startswith(b":")
        if not self._partial and read.startswith(b":"):
            # A byte order mark behind a comment is part of a field's name.
            self._first = False
        return line_rest + COMMENT.sub(b"", read)

    def _split(self, events: bytes) -> list[bytes]:
        if self._first:
            self._first = False
            events = events.removeprefix(b"\xef\xbb\xbf")
        return [data for data in map(_data_of, events.split(b"\n\n")) if data is not None]


def _data_of(event: bytes) -> bytes | None:
    """Return the lines of data of an event; None without any, as for a comment."""
    data = []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line == b"data":
            data.append(b"")
    return b"\n".join(data) if data else None


class Cutter(Protocol):
    """Splitter from reads to the data of complete events. Raises EventTooLong."""

    def feed(self, read: bytes) -> list[bytes]: ...

    def end(self) -> list[bytes]: ...


@dataclass(frozen=True, slots=True)
class Framing:
    """Framing of a stream; `content_type` is both requested and required."""

    content_type: str
    cutter: Callable[[], Cutter]


SSE = Framing("text/event-stream", EventCutter)
NDJSON = Framing("application/x-ndjson", LineCutter)
