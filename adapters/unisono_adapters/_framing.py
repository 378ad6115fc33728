"""Splitting of a response into its events: server-sent events, or lines of JSON."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import repeat
from operator import contains
from typing import Final, Protocol

from unisono.core.frozen import dataclass

# `LineCutter` splits newline-delimited JSON, which arrives in network reads of any size.
#
# It works on bytes, so a character that is split over two reads is complete when the line is decoded. It accepts LF
# and CRLF as line ends, and ignores empty lines.

# Maximum size of one event in bytes. A larger event raises EventTooLong.
MAX_LINE_BYTES = 10 * 1024 * 1024

# Bytes as numbers, because `CR in data` is faster than `b"\r" in data`. For the latter, Python first tries to convert
# the needle to a number and formats an error message: about 3,800 machine instructions instead of 100.
CR: Final = 0x0D
LF: Final = 0x0A

# A comment line, or the beginning of a comment line at the end of the data.
COMMENT: Final = re.compile(rb"^:.*\n?", re.MULTILINE)


class EventTooLong(Exception):
    """Line or event of more than `MAX_LINE_BYTES` bytes."""


class LineCutter:
    """Splitter of network reads into complete lines.

    The time is linear in the number of bytes, however the bytes are split into reads.
    """

    __slots__ = ("_partial", "_partial_size")

    def __init__(self) -> None:
        self._partial: list[bytes] = []
        self._partial_size = 0

    def feed(self, read: bytes) -> list[bytes]:
        """Return the lines that `read` completes, in order.

        Raises EventTooLong if the unfinished line is too long.
        """
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
        """Return the last line if no line break ends it.

        Call this at the end of the response.
        """
        line = b"".join(self._partial).strip()
        self._partial.clear()
        self._partial_size = 0
        return [line] if line else []


# `EventCutter` splits a stream of server-sent events, which arrives in network reads of any size.
#
# It works on bytes, so a character that is split over two reads is complete when the event is decoded. It accepts LF,
# CR, CRLF and any mix of these line ends, a byte order mark, comments and unknown fields. It joins the `data:` lines
# of an event as the standard requires.


class EventCutter:
    """Splitter of network reads into the data of complete events.

    The time is linear in the number of bytes, however the bytes are split into reads. Comments, which servers send to
    keep a connection open, are dropped at once and take no memory.
    """

    __slots__ = ("_first", "_in_comment", "_partial", "_partial_size", "_skip_newline")

    def __init__(self) -> None:
        # Bytes of the incomplete event, with all line ends converted to LF.
        self._partial: list[bytes] = []
        self._partial_size = 0
        self._skip_newline = False
        self._in_comment = False  # the incomplete line is a comment; its beginning was dropped
        self._first = True

    def feed(self, read: bytes) -> list[bytes]:
        """Return the data of the events that `read` completes, in order.

        Raises EventTooLong if the incomplete event is too long.
        """
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
        """Return the data of the last event if no blank line ends it.

        Call this at the end of the response.
        """
        events = b"".join(self._partial)
        self._partial.clear()
        self._partial_size = 0
        return self._split(events)

    def _with_newlines(self, read: bytes) -> bytes:
        """Return `read` with all line ends converted to LF."""
        if self._skip_newline and read:
            # The previous read ended in CR, which already ended the line: an LF here is the second half of CRLF.
            self._skip_newline = False
            read = read.removeprefix(b"\n")
        if CR in read:
            self._skip_newline = read.endswith(b"\r")
            read = read.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return read

    def _without_comments(self, read: bytes) -> bytes:
        """Return `read`, which is part of an incomplete event, without comments."""
        line_rest = b""
        if self._partial and not self._partial[-1].endswith(b"\n"):
            # The first line continues the last line of the previous part.
            line_rest, end, read = read.partition(b"\n")
            line_rest += end
        if not read.startswith(b":") and b"\n:" not in read:
            return line_rest + read
        self._in_comment = read.rpartition(b"\n")[2].startswith(b":")
        if not self._partial and read.startswith(b":"):
            # A byte order mark is one only at the beginning of the stream. After a comment it belongs to a field name.
            self._first = False
        return line_rest + COMMENT.sub(b"", read)

    def _split(self, events: bytes) -> list[bytes]:
        if self._first:
            self._first = False
            events = events.removeprefix(b"\xef\xbb\xbf")
        return [data for data in map(_data_of, events.split(b"\n\n")) if data is not None]


def _data_of(event: bytes) -> bytes | None:
    """Return the `data:` lines of an event, joined by LF; None if the event has no data."""
    data = []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line == b"data":
            data.append(b"")
    return b"\n".join(data) if data else None


class Cutter(Protocol):
    """Splitter of network reads into the data of complete events. `feed` raises EventTooLong."""

    def feed(self, read: bytes) -> list[bytes]: ...

    def end(self) -> list[bytes]: ...


@dataclass(frozen=True, slots=True)
class Framing:
    """Format of a stream of events.

    The gateway requests `content_type` in `Accept`, and rejects a response with any other content type.
    """

    content_type: str
    cutter: Callable[[], Cutter]


SSE = Framing("text/event-stream", EventCutter)
NDJSON = Framing("application/x-ndjson", LineCutter)
