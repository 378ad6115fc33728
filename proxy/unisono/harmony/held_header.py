"""Buffer of an incomplete header's tokens, and interpretation of its text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, NamedTuple

from unisono.core.frozen import statically_frozen
from unisono.core.generation import MESSAGE, START
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import Header, read_header
from unisono.harmony.header_text import header_text
from unisono.harmony.incomplete_header import read_bodyless
from unisono.harmony.recipients import offered

# A header that is started again is parsed again only up to this length, so that work stays linear.
MAX_REREAD_LENGTH: Final = 256  # characters
_MAX_TOKENS_PER_CHARACTER: Final = 4
# Maximum length of a cached header: in generated tokens, and in characters of its canonical spelling. They bound the
# memory of the caches.
MAX_CACHED_TOKENS: Final = 32
MAX_CACHED_LENGTH: Final = 128


@statically_frozen
@dataclass(frozen=True, slots=True)
class HeldHeader:
    """Tokens of one header that is not complete, or of text that may be a header."""

    # True if the output itself has the `<|start|>`; otherwise the prompt ends in it, or repair supplied it.
    role_given: bool = False
    # True if repair supplied the start.
    is_supplied: bool = False
    # True if the header interrupts a preamble.
    cuts_preamble: bool = False
    tokens: list[int] = field(default_factory=list)

    @property
    def may_be_short(self) -> bool:
        """True if the text may be short enough to be parsed again."""
        return len(self.tokens) <= _MAX_TOKENS_PER_CHARACTER * MAX_REREAD_LENGTH


class CompleteHeader(NamedTuple):
    """Meaning of a complete header, its legal tokens, and whether all of its text was UTF-8.

    The legal tokens begin with `<|start|>` and end with `<|message|>`.
    """

    header: Header
    legal: tuple[int, ...]
    is_text: bool


class HeaderReader:
    """Reader of buffered headers; `declared` and `builtins` are as for `Repair`."""

    def __init__(self, encoding: Encoding, declared: frozenset[str] | None, builtins: frozenset[str]) -> None:
        self._encoding = encoding
        self.role = list(encoding.assistant_start[1:])  # tokens of the role alone
        self.declared = declared
        self._builtins = builtins

    def text(self, held: HeldHeader) -> tuple[str, bool]:
        """Return the text, and whether all of it was UTF-8."""
        read = header_text if len(held.tokens) > MAX_CACHED_TOKENS else _cached_text
        return read(self._encoding, tuple(held.tokens))

    def read(self, held: HeldHeader) -> CompleteHeader:
        """Return the meaning and the legal tokens of a header that reached `<|message|>`."""
        read = _complete if len(held.tokens) > MAX_CACHED_TOKENS else _cached_complete
        return read(
            self._encoding, tuple(held.tokens), self.declared, self._builtins, held.role_given, held.is_supplied
        )

    def read_bodyless(self, held: HeldHeader, text: str, *, first: bool) -> Header:
        """Return the meaning of a header without `<|message|>`.

        `first` means that nothing precedes it in the output.
        """
        header = read_bodyless(text, self.declared, role_given=held.role_given, first=first)
        return _as_offered(header, self.declared, self._builtins)

    def spelled(self, header: Header) -> tuple[int, ...]:
        """Return the canonical tokens of a header."""
        return _spelled(self._encoding, header)


def _complete(
    encoding: Encoding,
    tokens: tuple[int, ...],
    declared: frozenset[str] | None,
    builtins: frozenset[str],
    role_given: bool,
    is_supplied: bool,
) -> CompleteHeader:
    text, is_text = header_text(encoding, tokens)
    header = read_header(text, declared, role_given=role_given, supplied=is_supplied)
    header = _as_offered(header, declared, builtins)
    if not header.verbatim:
        return CompleteHeader(header, _spelled(encoding, header), is_text)
    # A header begun by the prompt gets the prompt's own start.
    start = (START,) if role_given else encoding.assistant_start
    return CompleteHeader(header, (*start, *tokens, MESSAGE), is_text)


# A model repeats a few headers, so nearly all lookups hit the caches.
_cached_complete = lru_cache(maxsize=1024)(_complete)
_cached_text = lru_cache(maxsize=1024)(header_text)


def _spelled(encoding: Encoding, header: Header) -> tuple[int, ...]:
    text = header.spelled()
    tokens = encoding.encode_marked(text) if len(text) > MAX_CACHED_LENGTH else _tokens(encoding, text)
    return (*encoding.assistant_start, *tokens)


@lru_cache(maxsize=1024)
def _tokens(encoding: Encoding, text: str) -> tuple[int, ...]:
    return tuple(encoding.encode_marked(text))


def _as_offered(header: Header, declared: frozenset[str] | None, builtins: frozenset[str]) -> Header:
    """Return the header, given the offered builtin tools."""
    if not builtins or (recipient := offered(header.recipient, declared, builtins)) == header.recipient:
        return header
    if not recipient.is_corrected:
        return replace(header, recipient=recipient)
    rules = tuple(dict.fromkeys((*header.rules, "recipient-spelling")))
    return replace(header, recipient=recipient, rules=rules, verbatim=False)
