"""Detection of long runs of blanks outside of strings in a JSON body. No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

from unisono.harmony.encoding import Encoding

# Maximum run of blanks in characters, longer than any deep indentation.
MAX_BLANKS: Final = 64
BLANKS: Final = " \t\r\n"


class JsonPlace(Enum):
    """Place between two characters of a JSON text."""

    STRUCTURE = auto()  # outside of strings
    STRING = auto()
    ESCAPE = auto()  # in a string, after a backslash


# Read for every character; see `repair`.
_STRUCTURE: Final = JsonPlace.STRUCTURE
_STRING: Final = JsonPlace.STRING
_ESCAPE: Final = JsonPlace.ESCAPE

_STRINGS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)


def is_closed(json: str) -> bool:
    """Return whether an object or array was opened in JSON text and all brackets are closed."""
    structure = _STRINGS.sub("", json)
    opened = structure.count("{") + structure.count("[")
    return opened > 0 and opened == structure.count("}") + structure.count("]")


class BlankFilter:
    """Filter that withholds blanks outside of strings until more text follows.

    It also finds the run that is too long.
    """

    def __init__(self) -> None:
        self._place = _STRUCTURE
        self._run = ""  # blanks at the end of the text, which are withheld
        self._run_start = 0

    @property
    def is_too_long(self) -> bool:
        return len(self._run) > MAX_BLANKS

    def feed(self, text: str, position: int) -> str:
        """Return the text that may be emitted after adding `text`.

        `position` is the index in the body of the token that ends `text`.
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
        """Return the body's tokens without the run of blanks at its end."""
        begin = self._run_start
        # The first token of the run may also end a character that earlier tokens began.
        while begin and _is_continuation(encoding.decode_bytes(body[begin : self._run_start + 1])):
            begin -= 1
        rest = encoding.decode(body[begin : self._run_start + 1]).rstrip(BLANKS)
        return (*body[:begin], *encoding.encode_generated(rest))

    def restart(self) -> None:
        """Continue after the body without the run."""
        self._run = ""


def _is_continuation(raw: bytes) -> bool:
    """Return whether the first byte continues a UTF-8 character."""
    return raw[:1] != b"" and raw[0] & 0xC0 == 0x80
