"""Detection of long runs of blanks outside of strings in a JSON body. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from unisono.harmony.encoding import Encoding

# Maximum run of blanks in characters, longer than any deep indentation.
MAX_BLANKS: Final = 64
BLANKS: Final = " \t\r\n"


class BlankScanner:
    """Incremental scanner of a JSON body. `run` is the number of blanks at its end."""

    def __init__(self) -> None:
        self.run = 0
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._has_brackets = False

    @property
    def is_too_long(self) -> bool:
        return self.run > MAX_BLANKS

    @property
    def is_complete(self) -> bool:
        """True if an object or array was opened and all brackets are closed."""
        return self._has_brackets and self._depth == 0 and not self._in_string

    def feed(self, text: str) -> None:
        for character in text:
            if self._in_string:
                self._read_in_string(character)
            elif character in BLANKS:
                self.run += 1
            else:
                self.run = 0
                self._read_structure(character)

    def _read_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False

    def _read_structure(self, character: str) -> None:
        if character == '"':
            self._in_string = True
        elif character in "[{":
            self._has_brackets = True
            self._depth += 1
        elif character in "]}":
            self._depth -= 1


class BlankFilter:
    """Filter that withholds blanks outside of strings until more text follows.

    It also finds the run that is too long.
    """

    def __init__(self) -> None:
        self._scanner = BlankScanner()
        self._pending = ""
        self._run_start = 0

    @property
    def is_too_long(self) -> bool:
        return self._scanner.is_too_long

    @property
    def is_complete(self) -> bool:
        """True if the body before the run is complete JSON."""
        return self._scanner.is_complete

    def feed(self, text: str, position: int) -> str:
        """Return the text that may be emitted after adding `text`.

        `position` is the index in the body of the token that ends `text`.
        """
        before = self._scanner.run
        self._scanner.feed(text)
        if (self._scanner.run and self._scanner.run != before + len(text)) or not before:
            self._run_start = position
        text = self._pending + text
        end = len(text) - self._scanner.run
        self._pending = text[end:]
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
        self._pending = ""
        self._scanner.run = 0


def _is_continuation(raw: bytes) -> bool:
    """Return whether the first byte continues a UTF-8 character."""
    return raw[:1] != b"" and raw[0] & 0xC0 == 0x80
