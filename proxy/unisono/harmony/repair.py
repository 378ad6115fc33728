"""Repair of generated tokens to well-formed Harmony, with a named rule for every repair.

The output is a sequence of messages: `OpenPart` with a legal header, `BodyPart` of ordinary text, `ClosedPart`
with a terminator. The work is linear in the number of tokens. At most one header is buffered, or one message whose
meaning depends on its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from unisono.core.generation import CALL, CHANNEL, END, FIRST_SPECIAL, RETURN, START, FinishReason
from unisono.harmony.encoding import Encoding
from unisono.harmony.gate_protocol import Legal, OpenPart
from unisono.harmony.header import COMMENTARY, BodyHandling, Header
from unisono.harmony.header_buffer import HeaderBuffer, HeldHeader
from unisono.harmony.recipients import RecipientKind
from unisono.harmony.repair_table import MARKS, STEPS, GrammarAction, State
from unisono.harmony.repaired_output import OpenMessage, RepairedOutput

# Placeholder for the header of the open message, until the output begins its first message.
_NO_HEADER: Final = Header()
# Read for nearly every token. Python 3.11 needs about 700 machine instructions to read a member of an enumeration.
_BODY: Final = State.BODY
_FORWARD: Final = BodyHandling.FORWARD


class Repair:
    """State machine that repairs generated tokens; they may be fed in portions of any size.

    `declared` are the wire names of the offered tools, None if unknown. `builtins` are the offered tools that gpt-oss
    was trained on. `opening` is the header of a message that the prompt leaves open (a prefill or a forced header);
    None if the prompt ends in `<|start|>assistant`. `answered` means that the step already has an answer or a call.
    `position`, `origin` and `closed_to` are initial values. `RepairedOutput` explains these values and `open_body`. No
    input raises an exception.
    """

    # Rules of the states. The table `grammar.STEPS` gives the action for each token in each state.
    # - HEADER: tokens are buffered. `<|message|>` ends the header and opens a body. A terminator ends the header
    #   without a body: then the buffer contains header and body in one.
    # - BODY: text is added to the open message. `<|start|>` or `<|channel|>` closes the open message and begins another
    #   one.
    # - BETWEEN: `<|start|>` begins a header. `<|channel|>` or `<|message|>` begins a header too, and the missing
    #   `<|start|>` is supplied. Text leads to GAP.
    # - GAP: text between messages is buffered. The next marker decides whether the text is a header without its
    #   `<|start|>`, the answer, or text to drop.

    def __init__(
        self,
        encoding: Encoding,
        declared: frozenset[str] | None,
        opening: Header | None = None,
        builtins: frozenset[str] = frozenset(),
        *,
        answered: bool = False,
        position: int = 0,
        origin: int = 0,
        closed_to: int = 0,
        open_body: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self._encoding = encoding
        self.output = RepairedOutput(
            encoding,
            position=position,
            origin=origin,
            closed_to=closed_to,
            has_answer=answered,
            open_body=open_body,
        )
        self._state = State.HEADER if opening is None else State.BODY
        self._message = OpenMessage(self.output, encoding, opening or _NO_HEADER)
        self._header = HeaderBuffer(self.output, encoding, declared, builtins)

    def feed(self, tokens: Sequence[int]) -> list[Legal]:
        """Read further generated tokens, and return the parts of messages that they complete."""
        is_text = bytes([0 <= token < FIRST_SPECIAL for token in tokens])
        begin = 0
        while (marker := is_text.find(False, begin)) >= 0:
            self._add_text(tokens[begin:marker])
            self.output.position += 1
            self._act(tokens[marker])
            begin = marker + 1
        self._add_text(tokens[begin:])
        return self.output.take()

    def _add_text(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        # Text in a header or a body needs no lookup in the table, and nearly all tokens are text.
        if self._state is _BODY:
            self.output.position += len(tokens)
            self._message.add(tokens)
        elif self._state is State.HEADER:
            self.output.position += len(tokens)
            self._header.held.tokens.extend(tokens)
        else:
            for token in tokens:
                self.output.position += 1
                self._act(token)

    def try_forward(self, tokens: Sequence[int]) -> bool:
        """Advance past `tokens` if all of them extend an open body that is emitted at once.

        Otherwise return False and change nothing; the caller must then use `feed`.
        """
        message = self._message
        if self._state is not _BODY or message.unopened is not None or message.handling is not _FORWARD:
            return False
        for token in tokens:
            if not 0 <= token < FIRST_SPECIAL:
                return False
        self.output.position += len(tokens)
        return True

    def end(self, reason: FinishReason) -> list[Legal]:
        """Finish the output, and return its last parts."""
        complete = self._state is not State.GAP or reason is FinishReason.STOP
        match self._state:
            case State.GAP:
                self._drop_gap(END, None)
            case State.HEADER:
                self._end_in_header(reason)
            case State.BODY:
                complete_body = reason is FinishReason.STOP and not self._message.header.is_call
                self._message.close(END, self.output.position, complete=complete_body, terminated=False)
            case State.BETWEEN:
                pass
        if self.output.undecided is not None:
            self.output.decide(followed=False, complete=complete)
        self._state = State.BETWEEN
        return self.output.take()

    # -- actions of tokens

    def _act(self, token: int) -> None:
        action, rule = STEPS[self._state, MARKS[token]]
        _METHODS[action](self, token, rule)

    def _pass(self, token: int, rule: str | None) -> None:
        self._message.add([token])

    def _drop(self, token: int, rule: str | None) -> None:
        self._note(rule)

    def _note(self, rule: str | None) -> None:
        assert rule is not None
        self.output.note(rule)

    # -- headers

    def _hold(self, token: int, rule: str | None) -> None:
        if self._state is State.BETWEEN:
            self._start(State.GAP, HeldHeader())
        self._header.held.tokens.append(token)

    def _open(self, token: int, rule: str | None) -> None:
        self._start(State.HEADER, HeldHeader(role_given=True))

    def _supply_start(self, token: int, rule: str | None) -> None:
        self._note(rule)
        self._start(State.HEADER, HeldHeader(is_supplied=True))
        self._act(token)

    def _start(self, state: State, held: HeldHeader) -> None:
        self._state, self._header.held = state, held

    def _resolve(self, token: int, rule: str | None) -> None:
        """Interpret the complete header and open its message."""
        output = self.output
        header, legal, _ = self._header.read()
        handling = header.handling
        if self._header.held.cuts_preamble:
            output.note("missing-end" if header.recipient.kind is RecipientKind.NONE else "embedded-call")
        # If the body decides whether the message is a call, the repairs of the header are recorded at the end of the
        # body.
        if header.if_json is None and header.rules:
            output.note_header(header)
        # A dropped message does not count as a message that follows, so the text before it may still be the answer.
        if output.undecided is not None and handling is not BodyHandling.DROP:
            output.decide(followed=True)
        opened = None
        if handling is BodyHandling.FORWARD:
            opened = OpenPart(header, legal, output.closed_to, output.position)
        self._message = OpenMessage(output, self._encoding, header, handling, opened)
        self._state, self._header.is_first = State.BODY, False

    def _channel(self, token: int, rule: str | None) -> None:
        """Handle `<|channel|>` in a header.

        The marker belongs to the header, or begins the next header after a missing end.
        """
        if self._header.is_whole_message():
            self._bodyless(token, None)
            self._supply_start(token, "missing-start")
        else:
            self._header.held.tokens.append(token)

    def _restart(self, token: int, rule: str | None) -> None:
        """Handle `<|start|>` in a header.

        The same header begins again, or the next one begins after a message without a body.
        """
        if self._header.is_restarted():
            self._header.held.tokens.append(token)
        else:
            self._bodyless(token, None)
            self._open(token, None)

    def _bodyless(self, token: int, rule: str | None) -> None:
        """Interpret the buffer as a header directly followed by its body; `token` ended the body."""
        header = self._header.read_bodyless()
        self._header.note_cut_preamble()
        self.output.note_header(header)
        if rule is not None:
            self.output.note(rule)
        self._state, self._header.is_first = State.BETWEEN, False
        self.output.add_ended_header(header, token)

    # -- bodies

    def _close(self, token: int, rule: str | None) -> None:
        self._state = State.BETWEEN
        self._message.close(token, self.output.position, complete=True, terminated=True)

    def _close_text(self, token: int, rule: str | None) -> None:
        self._note(rule)
        self._state = State.BETWEEN
        self._message.cut(token, self.output.position)

    def _cut(self, token: int, rule: str | None) -> None:
        """Handle `<|start|>` or `<|channel|>` in a body.

        If the body is a preamble, the new header decides whether the preamble lacks its end marker or contains a call.
        """
        message = self._message
        if not (message.is_text and message.unopened):
            message.cut(token, self.output.position - 1)
        cuts_preamble = message.is_text and message.header.channel == COMMENTARY and token == CHANNEL
        if not cuts_preamble:
            self._note(rule)
        if token == START:
            self._start(State.HEADER, HeldHeader(role_given=True))
        else:
            self._start(State.HEADER, HeldHeader(is_supplied=True, cuts_preamble=cuts_preamble, tokens=[token]))

    # -- text between messages

    def _leave_gap(self, token: int, rule: str | None) -> None:
        held = self._header.header_from_text()
        if held is not None:
            self._start(State.HEADER, held)
            self._act(token)
        else:
            self._drop_gap_text()
            self._supply_start(token, "missing-start")

    def _drop_gap(self, token: int, rule: str | None) -> None:
        output = self.output
        if token == START or not self._header.holds_answer():
            self._drop_gap_text()
        else:
            output.decide(followed=True)
            output.hold_text(self._header.read_answer(), output.closed_to, output.position)
            self._state = State.BETWEEN
        action, _ = STEPS[State.BETWEEN, MARKS[token]]
        # The dropped text was recorded as a repair. A terminator after it is dropped without another record.
        if action is not GrammarAction.DROP:
            _METHODS[action](self, token, None)

    def _drop_gap_text(self) -> None:
        self.output.note("free-text-between", dropped=len(self._header.text()))
        self._state = State.BETWEEN

    # -- end of the output

    def restore_stop(self) -> bool:
        """Supply the stop token, which the backend never sends; return False if none is missing."""
        if self._state is State.BODY:
            is_call = self._message.may_be_call
        elif self._state is State.HEADER and not self._header.is_empty():
            is_call = self._header.read_bodyless().recipient.kind is not RecipientKind.NONE
        elif self._state is State.GAP and self._header.holds_answer():
            is_call = False
        else:
            return False
        self.output.note("restored-stop")
        self._act(CALL if is_call else RETURN)
        return True

    def _end_in_header(self, reason: FinishReason) -> None:
        header, output = self._header.read_unfinished(reason), self.output
        if header is not None:
            output.decide(followed=True)
            complete = reason is FinishReason.STOP and not header.is_call
            output.add_bodyless(header, END, output.closed_to, output.position, complete=complete)


# Method for each action of the grammar.
_METHODS: Final[Mapping[GrammarAction, Callable[[Repair, int, str | None], None]]] = {
    GrammarAction.PASS: Repair._pass,
    GrammarAction.HOLD: Repair._hold,
    GrammarAction.OPEN: Repair._open,
    GrammarAction.RESOLVE: Repair._resolve,
    GrammarAction.CLOSE: Repair._close,
    GrammarAction.CLOSE_TEXT: Repair._close_text,
    GrammarAction.CUT: Repair._cut,
    GrammarAction.BODYLESS: Repair._bodyless,
    GrammarAction.CHANNEL: Repair._channel,
    GrammarAction.RESTART: Repair._restart,
    GrammarAction.SUPPLY_START: Repair._supply_start,
    GrammarAction.LEAVE_GAP: Repair._leave_gap,
    GrammarAction.DROP_GAP: Repair._drop_gap,
    GrammarAction.DROP: Repair._drop,
}
