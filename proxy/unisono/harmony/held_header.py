"""Buffer of an incomplete header's tokens, and interpretation of its text."""

from __future__ import annotations

from typing import Final

from unisono.core.generation import MESSAGE, START
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import Header, as_offered, read_header
from unisono.harmony.header_text import header_text
from unisono.harmony.incomplete_header import read_bodyless

# A header that is started again is parsed again only up to this length, so that work stays linear.
MAX_REREAD_LENGTH: Final = 256  # characters
_MAX_TOKENS_PER_CHARACTER: Final = 4


class HeldHeader:
    """Buffered header; `declared` and `builtins` are as for `Repair`.

    If the output contains no start, the prompt ends in it.
    """

    def __init__(self, encoding: Encoding, declared: frozenset[str] | None, builtins: frozenset[str]) -> None:
        self._encoding = encoding
        self._declared = declared
        self._builtins = builtins
        self._start = tuple(encoding.encode_marked("<|start|>assistant"))
        self.tokens: list[int] = []
        self.role_given = False  # the output itself has the `<|start|>`
        self.supplied = False  # repair supplied the start

    def begin(self, *, role_given: bool, supplied: bool = False) -> None:
        self.tokens, self.role_given, self.supplied = [], role_given, supplied

    def text(self) -> tuple[str, bool]:
        """Return the text, and whether all of it was UTF-8."""
        return header_text(self._encoding, self.tokens)

    @property
    def may_be_short(self) -> bool:
        """True if the text may be short enough to be parsed again."""
        return len(self.tokens) <= _MAX_TOKENS_PER_CHARACTER * MAX_REREAD_LENGTH

    def read(self, text: str) -> Header:
        """Return the meaning of a header that reached `<|message|>`."""
        header = read_header(text, self._declared, role_given=self.role_given, supplied=self.supplied)
        return as_offered(header, self._declared, self._builtins)

    def read_bodyless(self, text: str, *, first: bool) -> Header:
        """Return the meaning of a header without `<|message|>`.

        `first` means that nothing precedes it in the output.
        """
        header = read_bodyless(text, self._declared, role_given=self.role_given, first=first)
        return as_offered(header, self._declared, self._builtins)

    def legal(self, header: Header) -> tuple[int, ...]:
        """Return the whole legal header, from `<|start|>` to `<|message|>`."""
        if not header.verbatim:
            return self.spelled(header)
        # A header begun by the prompt gets the prompt's own start.
        return (*((START,) if self.role_given else self._start), *self.tokens, MESSAGE)

    def spelled(self, header: Header) -> tuple[int, ...]:
        """Return the canonical tokens of a header."""
        return (*self._start, *self._encoding.encode_marked(header.spelled()))
