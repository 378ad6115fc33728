"""Buffer of the header that repair reads, and the meaning of its text."""

from __future__ import annotations

from unisono.core.generation import FinishReason
from unisono.harmony.header import Header
from unisono.harmony.held_header import MAX_REREAD_LENGTH, CompleteHeader, HeaderReader, HeldHeader
from unisono.harmony.incomplete_header import is_whole_message, may_be_answer, may_be_header, without_markers
from unisono.harmony.recipients import respell
from unisono.harmony.repaired_output import RepairedOutput


class HeaderBuffer:
    """Header that is not complete, or text between two messages that may be one.

    `is_first` means that no header was read yet. Repairs of the text are recorded in `output`.
    """

    # Rules.
    # - `<|message|>` completes a header. A terminator, the next message or the end of the output ends it without a
    #   body: then the text holds header and body in one.
    # - `<|channel|>` is a part of the header, or begins the next one if the text is already a whole message.
    # - `<|start|>` begins the same header again, or the next one if the text has a body.
    # - Long text is not parsed again at these two markers, so that work stays linear.

    def __init__(self, output: RepairedOutput, reader: HeaderReader) -> None:
        self._output = output
        self._reader = reader
        self.held = HeldHeader()
        self.is_first = True

    def text(self) -> str:
        """Return the text; record a repair for bytes that are not UTF-8."""
        text, whole = self._reader.text(self.held)
        if not whole:
            self._output.note("undecodable-header")
        return text

    # -- headers

    def read(self) -> CompleteHeader:
        """Return the complete header; record a repair if it has bytes that are not UTF-8."""
        complete = self._reader.read(self.held)
        if not complete.is_text:
            self._output.note("undecodable-header")
        return complete

    def read_bodyless(self) -> Header:
        """Return the meaning of the text as header and body in one."""
        return self._read_bodyless(self.text())

    def read_unfinished(self, reason: FinishReason) -> Header | None:
        """Return the meaning of a header that the end of the output ended; None without content."""
        output, text = self._output, self.text()
        self.note_cut_preamble()
        if not text.strip() and (self.is_first or not text):
            return None
        header = self._read_bodyless(text)
        # The start of a truncated recipient: the tokenizer splits ` to` from `=functions`.
        begun = reason is FinishReason.LENGTH and not header.thought and header.body in ("t", "to")
        if not text.strip() or not header.body or (begun and header.rules == ("header-without-message",)):
            output.note("cut-header")
            output.has_cut_call = output.has_cut_call or header.is_call or "to=functions." in text
            return None
        output.note_header(header)
        return None if header.dropped else header

    def note_cut_preamble(self) -> None:
        """Note the missing end of the preamble that a header without a body interrupted."""
        if self.held.cuts_preamble:
            self._output.note("missing-end")

    def is_empty(self) -> bool:
        """Return whether the text has no body."""
        text = self.text()
        return not text.strip() or not self._read_bodyless(text).body

    def is_restarted(self) -> bool:
        """Return whether `<|start|>` begins the same header again."""
        return self._is_short() and self.is_empty()

    def is_whole_message(self) -> bool:
        """Return whether `<|channel|>` begins the next header."""
        # Nearly always, nothing or only the role precedes the marker.
        held = self.held
        if not held.tokens or (held.role_given and held.tokens == self._reader.role):
            return False
        first = self.is_first and not held.role_given
        return self._is_short() and is_whole_message(respell(self.text(), self._reader.declared), first=first)

    def _is_short(self) -> bool:
        return self.held.may_be_short and len(self.text()) <= MAX_REREAD_LENGTH

    def _read_bodyless(self, text: str) -> Header:
        return self._reader.read_bodyless(self.held, text, first=self.is_first)

    # -- text between messages

    def header_from_text(self) -> HeldHeader | None:
        """Return the text as the beginning of a header; None if it cannot be one."""
        text = self.text()
        if not may_be_header(text, self._reader.declared):
            return None
        self._output.note("missing-start")
        return HeldHeader(text.startswith("assistant"), is_supplied=True, tokens=self.held.tokens)

    def holds_answer(self) -> bool:
        """Return whether the text is the answer if nothing follows."""
        return not self._output.has_answer and may_be_answer(self.text(), self._reader.declared)

    def read_answer(self) -> Header:
        """Return the text as an answer without its header."""
        body = without_markers(self.text())
        return Header(rules=("missing-start", "missing-channel"), body=body, stray=True)
