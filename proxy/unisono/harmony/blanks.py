"""Detection of long runs of blanks (spaces, tabs, line breaks) outside JSON strings. No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

from unisono.harmony.encoding import Encoding

# Maximum number of blanks in a row. Even deeply indented JSON has fewer.
MAX_BLANKS: Final = 64
BLANKS: Final = " \t\r\n"


class JsonPlace(Enum):
    """Context of the next character in a JSON text."""

    STRUCTURE = auto()  # outside strings
    STRING = auto()
    ESCAPE = auto()  # in a string, after a backslash


# Constants, because they are read for every character; the comment in `repair` gives the cost of an enumeration member.
_STRUCTURE: Final = JsonPlace.STRUCTURE
_STRING: Final = JsonPlace.STRING
_ESCAPE: Final = JsonPlace.ESCAPE

_STRINGS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)


def is_closed(json: str) -> bool:
    """Return whether `json` opens at least one object or array and closes every bracket."""
    structure = _STRINGS.sub("", json)
    opened = structure.count("{") + structure.count("[")
    return opened > 0 and opened == structure.count("}") + structure.count("]")


class BlankFilter:
    """Filter that withholds blanks outside JSON strings until another character follows.

    `is_too_long` becomes True when there are more than `MAX_BLANKS` blanks in a row.
    """

    def __init__(self) -> None:
        self._place = _STRUCTURE
        self._run = ""  # blanks at the end of the text, which are withheld
        self._run_start = 0

    @property
    def is_too_long(self) -> bool:
        return len(self._run) > MAX_BLANKS

    def feed(self, text: str, position: int) -> str:
        """Read further `text` of the body, and return the text that may be emitted now.

        `position` is the 0-based index, among the tokens of the body, of the last token of `text`.
        """
        place, before = self._place, len(self._run)
        run = before
        for character in text:
            if place is _STRUCTURE:
                run = run + 1 if character in BLANKS else 0
                place = _STRING if character == '"' else place
            elif place is _ESCAPE:
                place = _STRING
            elif character == "\\":
                place = _ESCAPE
            elif character == '"':
                place = _STRUCTURE
        self._place = place
        if (run and run != before + len(text)) or not before:
            self._run_start = position
        text = self._run + text
        end = len(text) - run
        self._run = text[end:]
        return text[:end]

    def trimmed(self, encoding: Encoding, body: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of `body` without the blanks at its end."""
        begin = self._run_start
        # The first token of the run may also end a character that earlier tokens began.
        while begin and _is_continuation(encoding.decode_bytes(body[begin : self._run_start + 1])):
            begin -= 1
        rest = encoding.decode(body[begin : self._run_start + 1]).rstrip(BLANKS)
        return (*body[:begin], *encoding.encode_generated(rest))

    def restart(self) -> None:
        """Forget the withheld blanks, after the caller removed them from the body."""
        self._run = ""


def _is_continuation(raw: bytes) -> bool:
    """Return whether the first byte of `raw` continues a UTF-8 character."""
    return raw[:1] != b"" and raw[0] & 0xC0 == 0x80
