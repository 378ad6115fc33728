"""Runs of blanks outside of strings in a JSON body. No I/O."""

from __future__ import annotations

from typing import Final

MAX_BLANKS: Final = 64
"""Characters in a row; a deep indentation is shorter."""
BLANKS: Final = " \t\r\n"


class BlankScanner:
    """Reads a body in portions, each character once. `run` is the number of blanks that it ends in."""

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
        """Whether an object or array was opened and all brackets are closed."""
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
