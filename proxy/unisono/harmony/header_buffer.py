"""Buffer for the tokens of an incomplete header, and interpretation of their text."""

from __future__ import annotations

from dataclasses import field, replace
from functools import lru_cache
from typing import Final, NamedTuple

from unisono.core.frozen import dataclass
from unisono.core.generation import MESSAGE, START, FinishReason
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import Header, read_header
from unisono.harmony.header_text import header_text, spelled_header
from unisono.harmony.incomplete_header import (
    is_whole_message,
    may_be_answer,
    may_be_header,
    read_bodyless,
    without_markers,
)
from unisono.harmony.recipients import offered, respell
from unisono.harmony.repaired_output import RepairedOutput

# Buffered text is parsed again at a further marker only up to this length, so that work stays linear.
MAX_REREAD_LENGTH: Final = 256  # characters
_MAX_TOKENS_PER_CHARACTER: Final = 4
# Maximum length in generated tokens of a header that is cached. It bounds the memory of the caches.
MAX_CACHED_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class HeldHeader:
    """Tokens of one header that is not complete, or of text that may be a header."""

    # True if the output contains the header's `<|start|>`; otherwise the prompt ends in it, or repair supplied it.
    role_given: bool = False
    # True if repair supplied the `<|start|>`.
    is_supplied: bool = False
    # True if the header interrupts a preamble.
    cuts_preamble: bool = False
    tokens: list[int] = field(default_factory=list)

    @property
    def may_be_short(self) -> bool:
        """False if there are so many tokens that their text must exceed `MAX_REREAD_LENGTH`."""
        return len(self.tokens) <= _MAX_TOKENS_PER_CHARACTER * MAX_REREAD_LENGTH


class CompleteHeader(NamedTuple):
    """Meaning of a complete header, its legal tokens, and whether all of its text was UTF-8.

    The legal tokens begin with `<|start|>` and end with `<|message|>`.
    """

    header: Header
    legal: tuple[int, ...]
    is_text: bool


class HeaderBuffer:
    """Buffer of an incomplete header, or of text between messages that may be a header.

    `Repair` explains `declared` and `builtins`. `is_first` means that no header was read yet. Repairs are recorded in
    `output`.
    """

    # Rules.
    # - `<|message|>` completes a header. A terminator, the next message or the end of the output ends it without a
    #   body: then the text holds header and body in one.
    # - `<|channel|>` belongs to the header. If the text is already a whole message, `<|channel|>` begins the next
    #   header.
    # - `<|start|>` begins the same header again. If the text has a body, `<|start|>` begins the next header.
    # - At `<|channel|>` and `<|start|>`, long text is not parsed again, so that work stays linear.

    def __init__(
        self, output: RepairedOutput, encoding: Encoding, declared: frozenset[str] | None, builtins: frozenset[str]
    ) -> None:
        self._output = output
        self._encoding = encoding
        self._declared = declared
        self._builtins = builtins
        self._role = list(encoding.assistant_start[1:])  # tokens of the role alone
        self.held = HeldHeader()
        self.is_first = True

    def text(self) -> str:
        """Return the text; record a repair for bytes that are not UTF-8."""
        tokens = self.held.tokens
        read = header_text if len(tokens) > MAX_CACHED_TOKENS else _cached_text
        text, is_text = read(self._encoding, tuple(tokens))
        if not is_text:
            self._output.note("undecodable-header")
        return text

    # -- headers

    def read(self) -> CompleteHeader:
        """Return the complete header; record a repair for bytes that are not UTF-8."""
        held = self.held
        read = _complete if len(held.tokens) > MAX_CACHED_TOKENS else _cached_complete
        complete = read(
            self._encoding, tuple(held.tokens), self._declared, self._builtins, held.role_given, held.is_supplied
        )
        if not complete.is_text:
            self._output.note("undecodable-header")
        return complete

    def read_bodyless(self) -> Header:
        """Interpret the text as a header that is directly followed by its body."""
        return self._read_bodyless(self.text())

    def read_unfinished(self, reason: FinishReason) -> Header | None:
        """Interpret the text as a header in which the output ended because of `reason`.

        Return None if the text contains no part of a message that can be emitted.
        """
        output, text = self._output, self.text()
        self.note_cut_preamble()
        if not text.strip() and (self.is_first or not text):
            return None
        header = self._read_bodyless(text)
        # The beginning of a truncated recipient: the tokenizer splits ` to=functions` into ` to` and `=functions`.
        begun = reason is FinishReason.LENGTH and not header.thought and header.body in ("t", "to")
        if not text.strip() or not header.body or (begun and header.rules == ("header-without-message",)):
            output.note("cut-header")
            output.has_cut_call = output.has_cut_call or header.is_call or "to=functions." in text
            return None
        output.note_header(header)
        return None if header.dropped else header

    def note_cut_preamble(self) -> None:
        """Record the repair of a preamble that this header interrupted before its end marker."""
        if self.held.cuts_preamble:
            self._output.note("missing-end")

    def is_empty(self) -> bool:
        """Return whether the text has no body if it ends here, without `<|message|>`."""
        text = self.text()
        return not text.strip() or not self._read_bodyless(text).body

    def is_restarted(self) -> bool:
        """Return whether a `<|start|>` that follows the text begins the same header again."""
        return self._is_short() and self.is_empty()

    def is_whole_message(self) -> bool:
        """Return whether the text is a whole message. `<|channel|>` then begins the next header."""
        # In nearly all output, `<|channel|>` follows the role, or nothing.
        held = self.held
        if not held.tokens or (held.role_given and held.tokens == self._role):
            return False
        first = self.is_first and not held.role_given
        return self._is_short() and is_whole_message(respell(self.text(), self._declared), first=first)

    def _is_short(self) -> bool:
        return self.held.may_be_short and len(self.text()) <= MAX_REREAD_LENGTH

    def _read_bodyless(self, text: str) -> Header:
        header = read_bodyless(text, self._declared, role_given=self.held.role_given, first=self.is_first)
        return _as_offered(header, self._declared, self._builtins)

    # -- text between messages

    def header_from_text(self) -> HeldHeader | None:
        """Return a held header that begins with the text; None if the text is not like a header."""
        text = self.text()
        if not may_be_header(text, self._declared):
            return None
        self._output.note("missing-start")
        return HeldHeader(text.startswith("assistant"), is_supplied=True, tokens=self.held.tokens)

    def holds_answer(self) -> bool:
        """Return whether the text is the answer if nothing follows."""
        return not self._output.has_answer and may_be_answer(self.text(), self._declared)

    def read_answer(self) -> Header:
        """Return the header of an answer for which the model wrote none; its `body` is the text."""
        body = without_markers(self.text())
        return Header(rules=("missing-start", "missing-channel"), body=body, stray=True)


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
        return CompleteHeader(header, spelled_header(encoding, header), is_text)
    # The prompt contains the `<|start|>assistant` of the output's first header.
    start = (START,) if role_given else encoding.assistant_start
    return CompleteHeader(header, (*start, *tokens, MESSAGE), is_text)


# A model repeats a few headers, so nearly all lookups hit the caches.
_cached_complete = lru_cache(maxsize=1024)(_complete)
_cached_text = lru_cache(maxsize=1024)(header_text)


def _as_offered(header: Header, declared: frozenset[str] | None, builtins: frozenset[str]) -> Header:
    """Return the header, with a recipient of kind `HOSTED` if it is an offered builtin tool.

    `builtins` are the names of the builtin tools that the request offers. `declared` are the names of the functions
    that the request declares.
    """
    if not builtins or (recipient := offered(header.recipient, declared, builtins)) == header.recipient:
        return header
    if not recipient.is_corrected:
        return replace(header, recipient=recipient)
    rules = tuple(dict.fromkeys((*header.rules, "recipient-spelling")))
    return replace(header, recipient=recipient, rules=rules, verbatim=False)
