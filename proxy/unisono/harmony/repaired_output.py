"""Output of repair: messages with positions, recorded repairs, and text without a channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from unisono.core.events import Repaired
from unisono.core.frozen import dataclass
from unisono.core.generation import CALL, CHANNEL, END, RETURN, START
from unisono.harmony.encoding import Encoding
from unisono.harmony.gate_protocol import BodyPart, ClosedPart, Legal, OpenPart
from unisono.harmony.header import ANALYSIS, FINAL, BodyHandling, Header
from unisono.harmony.header_text import spelled_header
from unisono.harmony.incomplete_header import decide, is_json_object
from unisono.harmony.recipients import RecipientKind

# Read for nearly every token; see `repair`.
_FORWARD: Final = BodyHandling.FORWARD

TERMINATORS = frozenset({END, RETURN, CALL})
# Markers that begin the next message.
_OPENINGS: Final = frozenset({START, CHANNEL})


def is_whole_call(body: str, token: int) -> bool:
    """Return whether a call with this `body` is complete before `token`, without a terminator."""
    # Truncated arguments are not a JSON object. Only `<|start|>` shows that the model meant to end the message.
    return token == START and is_json_object(body)


@dataclass(frozen=True, slots=True)
class UndecidedText:
    """Text without a channel, from the position `start` to the position `end`."""

    header: Header
    start: int
    end: int


class RepairedOutput:
    """Output of repair since the last call of `take`. `gate` explains positions.

    `position` is the position after the last token that was read, and `origin` is the number of generated tokens
    before position 0; negative if tokens were inserted. `closed_to` is the position after the last closed message.
    `has_answer` means that the prompt or the output contains an answer or a call of the current step. `open_body`
    returns the part of the open message's body that `take` has already returned.
    """

    # Rules for text without a channel, such as output without any marker.
    # - The text is the answer if no message follows it and the step has no other answer.
    # - The text is reasoning if a message follows it.
    # - The text is dropped if it has no header at all, and is between two messages.
    # - At most one text is undecided at a time, because the next message decides about it.

    def __init__(
        self,
        encoding: Encoding,
        *,
        position: int,
        origin: int,
        closed_to: int,
        has_answer: bool,
        open_body: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self._encoding = encoding
        self._open_body = open_body
        self.parts: list[Legal] = []
        # For each part that is not a repair, the position after the token that decided the part. Parts that `take` has
        # returned are included.
        self.marks: list[int] = []
        self.position = position
        self.origin = origin
        self.closed_to = closed_to
        self.has_answer = has_answer
        self.has_cut_call = False  # the output contains an incomplete call, and no complete message after it
        self.undecided: UndecidedText | None = None

    def take(self) -> list[Legal]:
        """Return the parts that were added since the last call of `take`, and clear `parts`."""
        parts, self.parts = self.parts, []
        return parts

    # -- notes

    def note(self, rule: str, dropped: int = 0) -> None:
        """Record a repair; `dropped` is the number of characters that the repair removed."""
        self.parts.append(Repaired(rule, self.origin + self.position, dropped))

    def note_header(self, header: Header) -> None:
        """Record all repairs of a header."""
        for rule in header.rules:
            self.note(rule, dropped=header.lost if rule == "stray-header-words" else 0)

    def note_cut_call(self) -> None:
        self.has_cut_call = True
        self.note("unfinished-call")

    # -- messages

    def open_body(self) -> list[int]:
        """Return the body of the open message, including the part that `take` has returned."""
        begin = next((at for at in reversed(range(len(self.parts))) if isinstance(self.parts[at], OpenPart)), -1)
        added = [token for part in self.parts[begin + 1 :] if isinstance(part, BodyPart) for token in part.tokens]
        return added if begin >= 0 else [*self._open_body(), *added]

    def close(self, header: Header, closed: ClosedPart) -> None:
        self.parts.append(closed)
        self.marks.append(self.position)
        self.has_answer = self.has_answer or header.is_answer
        self.has_cut_call = self.has_cut_call and not closed.complete

    def add_message(self, header: Header, body: Sequence[int], closed: ClosedPart, start: int) -> None:
        """Add a message that was read as a whole, from the position `start`."""
        self.parts.append(OpenPart(header, spelled_header(self._encoding, header), start, closed.end, is_whole=True))
        self.marks.append(self.position)
        if body:
            self.parts.append(BodyPart(body))
            self.marks.append(self.position)
        self.close(header, closed)

    def add_bodyless(self, header: Header, token: int, start: int, end: int, *, complete: bool) -> None:
        """Add a message that `token` ended before any `<|message|>`; its text is `header.body`.

        An incomplete call is recorded as a repair, but not added.
        """
        if header.is_call and not complete:
            self.note_cut_call()
            return
        # A start or the end of the output leaves the message without a terminator of its own.
        supplied = CALL if header.is_call else END
        terminator = token if token in TERMINATORS else supplied
        body = self._encoding.encode_generated(header.body)
        self.add_message(header, body, ClosedPart(terminator, complete, end), start)
        self.closed_to = end

    def add_ended_header(self, header: Header, token: int) -> None:
        """Add the message of a header that `token` ended before any `<|message|>`, or hold its text.

        Text without a channel is held. The text is reasoning if a message follows, and otherwise the answer.
        """
        if header.dropped or (not header.body and not header.is_call):
            return
        # A start or channel marker belongs to the next message.
        start, end = self.closed_to, self.position - (token in _OPENINGS)
        self.decide(followed=True)
        if header.thought and (token == END or token in _OPENINGS):
            self.hold_text(header, start, end)
            self.closed_to = end
            return
        complete = not header.is_call or token in TERMINATORS or is_whole_call(header.body, token)
        self.add_bodyless(header, token, start, end, complete=complete)

    # -- undecided text

    def hold_text(self, header: Header, start: int, end: int) -> None:
        """Hold text without a channel until `decide` decides whether it is reasoning or the answer."""
        self.undecided = UndecidedText(header, start, end)

    def decide(self, *, followed: bool, complete: bool = True) -> None:
        """Add the undecided text as reasoning or as the answer, or drop it.

        `followed` means that a message follows the text. `complete` is False if the output was truncated.
        """
        if self.undecided is None:
            return
        text, self.undecided = self.undecided, None
        header = text.header
        if header.stray and followed:
            self.note("free-text-between", dropped=len(header.body))
            return
        # If the text has a header, the repairs of the header were recorded when it was read.
        self.note_header(header if header.stray else Header())
        header = replace(header, channel=ANALYSIS if followed else FINAL)
        self.add_bodyless(header, END, text.start, text.end, complete=complete)


class OpenMessage:
    """Message whose header was read, and whose terminator has not arrived.

    `handling` determines whether the body is forwarded, buffered or dropped. `unopened` is the part that opens the
    message. `unopened` is None if the part was emitted already, or if the prompt opened the message.
    """

    # Rules.
    # - `unopened` is emitted with the first body token, because an empty preamble may be the beginning of a call.
    # - A message to a tool is a call only if it has a terminator, or if its body is a JSON object and `<|start|>`
    #   follows. Otherwise, `closed_to` stays before the message.

    def __init__(
        self,
        output: RepairedOutput,
        encoding: Encoding,
        header: Header,
        handling: BodyHandling = BodyHandling.FORWARD,
        unopened: OpenPart | None = None,
    ) -> None:
        self._output = output
        self._encoding = encoding
        self.header = header
        self.handling = handling
        self.unopened = unopened
        self._buffered: list[int] = []

    @property
    def may_be_call(self) -> bool:
        return self.header.recipient.kind is not RecipientKind.NONE or self.handling is BodyHandling.BUFFER

    @property
    def is_text(self) -> bool:
        """True if the message is forwarded and has no recipient."""
        return self.handling is BodyHandling.FORWARD and self.header.recipient.kind is RecipientKind.NONE

    def add(self, tokens: Sequence[int]) -> None:
        if self.handling is _FORWARD:
            output = self._output
            if self.unopened is not None:
                self._open(self.unopened, output.position - len(tokens) + 1)
            output.parts.append(BodyPart(tokens))
            output.marks.append(output.position)
        else:
            self._buffered.extend(tokens)

    def close(self, token: int, end: int, *, complete: bool, terminated: bool) -> None:
        """Close the message at the position `end`, with the terminator `token`.

        `complete` is False if the message was truncated. `terminated` is False if the model did not end the message.
        """
        output = self._output
        match self.handling:
            case BodyHandling.DROP:
                output.note("foreign-role", dropped=len(self._encoding.decode(self._buffered)))
            case BodyHandling.BUFFER:
                self._decide(ClosedPart(token, complete, end), terminated=terminated)
            case BodyHandling.FORWARD:
                if self.unopened is not None:
                    self._open(self.unopened, output.position)
                if self.header.is_call and not complete:
                    output.note_cut_call()
                output.close(self.header, ClosedPart(token, complete, end))
        # A truncated call is not a closed message, so `closed_to` stays before it.
        if complete or not self.header.is_call:
            output.closed_to = end

    def cut(self, token: int, end: int) -> None:
        """Close the message at the position `end`, because `token` follows instead of a terminator."""
        is_called = self.header.is_call or self.header.if_json is not None
        if is_called and is_whole_call(self._encoding.decode(self._body()), token):
            self.close(CALL, end, complete=True, terminated=True)
        else:
            self.close(END, end, complete=not self.header.is_call, terminated=False)

    def _body(self) -> list[int]:
        if self.handling is BodyHandling.BUFFER:
            return self._buffered
        # The output contains the message only after its first body token.
        return [] if self.unopened is not None else self._output.open_body()

    def _open(self, unopened: OpenPart, position: int) -> None:
        self._output.parts.append(unopened)
        self._output.marks.append(position)
        self.unopened = None

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
