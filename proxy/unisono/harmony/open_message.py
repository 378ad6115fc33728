"""Open message of repair: forwarded, buffered until its end decides, or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from unisono.core.generation import END
from unisono.harmony.candidates import decide
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import Header
from unisono.harmony.message_parts import ClosedPart, OpenPart
from unisono.harmony.recipients import NOBODY, RecipientKind
from unisono.harmony.repaired_output import RepairedOutput


class BodyHandling(Enum):
    """Handling of a body's tokens, which the header decides."""

    # Emit every token at once.
    FORWARD = auto()
    # Buffer the body: its terminator, or its JSON, decides whether the message is a call.
    BUFFER = auto()
    # Drop the message: its role is invented.
    DROP = auto()

    @classmethod
    def of(cls, header: Header) -> BodyHandling:
        if header.if_called is not NOBODY or header.if_json is not None:
            return cls.BUFFER
        return cls.DROP if header.dropped else cls.FORWARD


class OpenMessage:
    """Message whose header was read and whose terminator was not.

    `opened` is the part to emit in front of the body; None if it was emitted, or if the prompt opened the message.
    """

    # Rules.
    # - `opened` waits for the first body token: an empty preamble may be the beginning of a call.
    # - A call without its terminator is no call, and its position is not closed.

    def __init__(
        self,
        output: RepairedOutput,
        encoding: Encoding,
        header: Header,
        handling: BodyHandling = BodyHandling.FORWARD,
        opened: OpenPart | None = None,
    ) -> None:
        self._output = output
        self._encoding = encoding
        self.header = header
        self.handling = handling
        self._opened = opened
        self._buffered: list[int] = []

    @property
    def is_unopened(self) -> bool:
        """True if nothing of the message was emitted and its body is empty."""
        return self._opened is not None

    @property
    def may_be_call(self) -> bool:
        return self.header.recipient.kind is not RecipientKind.NONE or self.handling is BodyHandling.BUFFER

    @property
    def is_text(self) -> bool:
        """True if the message is forwarded and has no recipient."""
        return self.handling is BodyHandling.FORWARD and self.header.recipient.kind is RecipientKind.NONE

    def add(self, tokens: Sequence[int]) -> None:
        if self.handling is BodyHandling.FORWARD:
            if self._opened is not None:
                self._emit_opened(self._opened)
            self._output.add_body(tokens)
        else:
            self._buffered += tokens

    def close(self, token: int, end: int, *, complete: bool, terminated: bool) -> None:
        """Close the message at the position `end`.

        If it is not `terminated`, repair supplied `token`.
        """
        output = self._output
        match self.handling:
            case BodyHandling.DROP:
                output.note("foreign-role", dropped=len(self._encoding.decode(self._buffered)))
            case BodyHandling.BUFFER:
                self._decide(ClosedPart(token, complete, end), terminated=terminated)
            case BodyHandling.FORWARD:
                if self._opened is not None:
                    self._emit_opened(self._opened)
                if self.header.is_call and not complete:
                    output.note_cut_call()
                output.close(self.header, ClosedPart(token, complete, end))
        # The position before a call without its terminator stays the end of the last message.
        if complete or not self.header.is_call:
            output.closed_to = end

    def cut(self, end: int) -> None:
        """Close the message at the beginning of another one."""
        self.close(END, end, complete=not self.header.is_call, terminated=False)

    def _emit_opened(self, opened: OpenPart) -> None:
        self._output.open(opened)
        self._opened = None

    def _decide(self, closed: ClosedPart, *, terminated: bool) -> None:
        output = self._output
        text = self._encoding.decode(self._buffered)
        header = decide(self.header, text, closed.token, terminated=terminated)
        if self.header.if_json is not None:
            output.note_header(header)
        if header.is_call and not terminated:
            output.note_cut_call()
        elif header.dropped:
            output.note("foreign-role", dropped=len(text))
        else:
            output.add_message(header, self._buffered, closed, output.closed_to)
