"""Tokens of the messages and headers that prompt edits insert. No I/O."""

from __future__ import annotations

from typing import Final

from unisono.core.conversation import Tokens
from unisono.core.generation import CALL, END, RETURN
from unisono.engine.wishes import recipient_of
from unisono.harmony.encoding import Encoding
from unisono.harmony.gate import Stopped
from unisono.harmony.header import FINAL, Header

NOT_AVAILABLE: Final = "This tool is not available now. Use another one, or answer without."


class HeaderSpelling:
    """Encoder of messages and headers.

    Headers do not include `<|start|>assistant`; whole messages begin with it.
    """

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._start = tuple(encoding.encode_marked("<|start|>assistant"))

    @property
    def answer(self) -> Tokens:
        """Return the header of an answer."""
        return self.header(Header(FINAL))

    def header(self, header: Header) -> Tokens:
        return tuple(self._encoding.encode_marked(header.spelled()))

    def written(self, at: Stopped) -> Tokens:
        """Return the header as the model wrote it, where that is legal."""
        # The network cuts text into other tokens; legal headers spell no markers in ordinary tokens.
        return tuple(self._encoding.encode_marked(self._encoding.decode(at.tokens)))[len(self._start) :]

    def body(self, at: Stopped) -> Tokens:
        """Return the body with its terminator."""
        stop = CALL if at.header.is_call else RETURN
        return (*self._encoding.encode_generated(at.text or ""), stop)

    def empty(self, at: Stopped) -> Tokens:
        """Return the message without its body."""
        return (*self._start, *self.written(at), END)

    def refused(self, at: Stopped) -> Tokens:
        """Return the call as the model wrote it, with a result that states why it was not run."""
        header = f"<|start|>{recipient_of(at.header)} to=assistant<|channel|>{at.header.channel}<|message|>"
        body = self._encoding.encode_generated(at.text or "")
        result = (*self._encoding.encode_marked(header), *self._encoding.encode_text(NOT_AVAILABLE), END)
        return (*self._start, *self.written(at), *body, CALL, *result)
