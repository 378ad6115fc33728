"""Splitter of server-sent events from network reads of any size.

It works on bytes, so a character split over two reads is reassembled before decoding. It accepts LF, CR, CRLF
and any mix of them, a byte order mark, comments and unknown fields. It joins an event's `data:` lines as the
standard requires.
"""

from __future__ import annotations

from unisono_adapters._ndjson import MAX_LINE_BYTES, EventTooLong


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
