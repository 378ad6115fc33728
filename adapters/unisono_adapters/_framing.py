"""Framing of an event stream: its content type and its splitter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# Splitter of newline-delimited JSON from network reads of any size.
#
# It works on bytes, so a character split over two reads is reassembled before decoding. It accepts LF and CRLF and
# ignores empty lines.

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


# Splitter of server-sent events from network reads of any size.
#
# It works on bytes, so a character split over two reads is reassembled before decoding. It accepts LF, CR, CRLF and
# any mix of them, a byte order mark, comments and unknown fields. It joins an event's `data:` lines as the standard
# requires.


class EventCutter:
    """Splitter from reads to the data of complete events.

    Linear in the bytes, however they are split.
    """

    __slots__ = ("_data", "_data_size", "_first", "_partial", "_partial_size", "_skip_newline")

    def __init__(self) -> None:
        self._partial: list[bytes] = []
        self._partial_size = 0
        self._data: list[bytes] = []
        self._data_size = 0
        self._skip_newline = False
        self._first = True

    def feed(self, read: bytes) -> list[bytes]:
        """Return the data of the events completed by `read`, in order. Raises EventTooLong."""
        # Fast path for reads of whole events with one `data:` line each. Two newlines per event exclude anything else.
        if not (self._partial or self._data) and read.startswith(b"data: ") and read.endswith(b"\n\n"):
            events = read[6:-2].split(b"\n\ndata: ")
            if b"\r" not in read and read.count(b"\n") == 2 * len(events):
                self._skip_newline = self._first = False
                return events
        if self._skip_newline and read:
            # The previous read ended in CR, which ended its line: a following LF belongs to it.
            self._skip_newline = False
            if read[:1] == b"\n":
                read = read[1:]
        if b"\r" in read:
            self._skip_newline = read.endswith(b"\r")
            read = read.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in read:
            self._keep_rest(read)
            return []
        lines = read.split(b"\n")
        if self._partial:
            self._partial.append(lines[0])
            lines[0] = b"".join(self._partial)
            self._partial.clear()
            self._partial_size = 0
        rest = lines.pop()
        if rest:
            self._keep_rest(rest)
        return self._events(lines)

    def end(self) -> list[bytes]:
        """Return the last events: an event without its blank line still counts."""
        lines = [b"".join(self._partial), b""]
        self._partial.clear()
        self._partial_size = 0
        return self._events(lines)

    def _keep_rest(self, rest: bytes) -> None:
        self._partial.append(rest)
        self._partial_size += len(rest)
        if self._partial_size > MAX_LINE_BYTES:
            raise EventTooLong

    def _events(self, lines: list[bytes]) -> list[bytes]:
        if self._first and lines:
            self._first = False
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
        events = []
        data = self._data
        for line in lines:
            if not line:
                if data:
                    events.append(data[0] if len(data) == 1 else b"\n".join(data))
                    data.clear()
                    self._data_size = 0
            elif line.startswith(b"data:"):
                data.append(line[6:] if line[5:6] == b" " else line[5:])
                self._data_size += len(line)
                if self._data_size > MAX_LINE_BYTES:
                    raise EventTooLong
            elif line == b"data":
                data.append(b"")
        return events


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
