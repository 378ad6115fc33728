"""Repair of generated tokens to well-formed Harmony, with a named rule for every repair.

The output is a sequence of messages: `OpenPart` with a legal header, `BodyPart` of ordinary text, `ClosedPart`
with a terminator. Work is linear in the tokens. At most one header is buffered, or one message that its end
decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from unisono.core.generation import CALL, CHANNEL, END, FIRST_SPECIAL, RETURN, START, FinishReason
from unisono.harmony.encoding import Encoding
from unisono.harmony.grammar import STEPS, GrammarAction, State, mark_of
from unisono.harmony.header import COMMENTARY, Header
from unisono.harmony.held_header import MAX_REREAD_LENGTH, HeaderReader, HeldHeader
from unisono.harmony.incomplete_header import is_whole_message, may_be_answer, may_be_header, without_markers
from unisono.harmony.message_parts import Legal, OpenPart
from unisono.harmony.open_message import BodyHandling, OpenMessage
from unisono.harmony.recipients import RecipientKind, respell
from unisono.harmony.repaired_output import TERMINATORS, RepairedOutput


class Repair:
    """State machine that repairs generated tokens; they may be fed in portions of any size.

    `declared` are the wire names of the offered tools, None if unknown. `builtins` are the offered tools that gpt-oss
    was trained on. `opening` is the header of a message that the prompt leaves open (a prefill or a forced header).
    Without it, the prompt ends in `<|start|>assistant`. `answered`: the step already has an answer or a call, in tokens
    before these. `position` is that of the first token, counted as in `message_parts`. `origin` is the number of
    generated tokens before position 0. `closed_to` is the position after the last closed message. No input raises an
    exception.
    """

    # Rules. The table `grammar.STEPS` gives the action for each token in each state.
    # - HEADER: tokens are buffered. `<|message|>` ends the header and opens a body. A terminator ends it without
    #   a body: then the buffer holds header and body in one.
    # - BODY: text goes to the open message. `<|start|>` or `<|channel|>` begins another message, and the open
    #   one is closed first.
    # - BETWEEN: a start opens a header. Other markers open one whose start is supplied. Text leads to GAP.
    # - GAP: text between messages is buffered. The next marker decides whether it is a header without its start,
    #   the answer, or text to drop.

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
    ) -> None:
        self._encoding = encoding
        self._reader = HeaderReader(encoding, declared, builtins)
        self.output = RepairedOutput(
            encoding, self._reader, position=position, origin=origin, closed_to=closed_to, has_answer=answered
        )
        self._state = State.HEADER if opening is None else State.BODY
        self._message = OpenMessage(self.output, encoding, opening or Header())
        self._held = HeldHeader()
        self._run: list[int] = []  # body tokens of the current portion
        self._is_first = True  # no header was read yet
        self.has_restored_stop = False
        self._actions: Mapping[GrammarAction, Callable[[int, str | None], None]] = {
            GrammarAction.PASS: self._pass,
            GrammarAction.HOLD: self._hold,
            GrammarAction.OPEN: self._open,
            GrammarAction.RESOLVE: self._resolve,
            GrammarAction.CLOSE: self._close,
            GrammarAction.CLOSE_TEXT: self._close_text,
            GrammarAction.CUT: self._cut,
            GrammarAction.BODYLESS: self._bodyless,
            GrammarAction.CHANNEL: self._channel,
            GrammarAction.RESTART: self._restart,
            GrammarAction.SUPPLY_START: self._supply_start,
            GrammarAction.LEAVE_GAP: self._leave_gap,
            GrammarAction.DROP_GAP: self._drop_gap,
            GrammarAction.DROP: self._drop,
        }

    def feed(self, tokens: Sequence[int]) -> list[Legal]:
        """Return the parts that further generated tokens give."""
        for token in tokens:
            self.output.position += 1
            if self._state is State.BODY and 0 <= token < FIRST_SPECIAL:
                self._run.append(token)
            else:
                self._act(token)
        self._flush()
        return self.output.take()

    def end(self, reason: FinishReason, *, stop_hidden: bool = False) -> list[Legal]:
        """Finish the output; `stop_hidden` restores the stop that the backend never sends."""
        if stop_hidden and reason is FinishReason.STOP:
            self._restore_stop()
        self._flush()
        complete = self._state is not State.GAP or reason is FinishReason.STOP
        match self._state:
            case State.GAP:
                self._drop_gap(END, None)
            case State.HEADER:
                self._end_in_header(reason)
            case State.BODY:
                self._end_in_body(reason)
            case State.BETWEEN:
                pass
        self.output.settle(followed=False, complete=complete)
        self._state = State.BETWEEN
        return self.output.take()

    # -- actions of tokens

    def _act(self, token: int) -> None:
        self._flush()
        action, rule = STEPS[self._state, mark_of(token)]
        self._actions[action](token, rule)

    def _flush(self) -> None:
        """Pass the body tokens of the current portion on."""
        if self._run:
            run, self._run = self._run, []
            self._message.add(run)

    def _pass(self, token: int, rule: str | None) -> None:
        self._run.append(token)

    def _drop(self, token: int, rule: str | None) -> None:
        self._note(rule)

    def _note(self, rule: str | None) -> None:
        assert rule is not None
        self.output.note(rule)

    # -- headers

    def _hold(self, token: int, rule: str | None) -> None:
        if self._state is State.BETWEEN:
            self._state, self._held = State.GAP, HeldHeader()
        self._held.tokens.append(token)

    def _open(self, token: int, rule: str | None) -> None:
        self._start_header(HeldHeader(role_given=True))

    def _supply_start(self, token: int, rule: str | None) -> None:
        self._note(rule)
        self._start_header(HeldHeader(is_supplied=True))
        self._act(token)

    def _start_header(self, held: HeldHeader) -> None:
        self._state, self._held = State.HEADER, held

    def _resolve(self, token: int, rule: str | None) -> None:
        """Interpret the complete header and open its message."""
        output = self.output
        header = self._reader.read(self._held, self._held_text())
        handling = BodyHandling.of(header)
        if self._held.cuts_preamble:
            calls = header.recipient.kind is not RecipientKind.NONE
            output.note("embedded-call" if calls else "missing-end")
        # If the body decides, it also decides which rules are noted.
        output.note_header(header if header.if_json is None else Header())
        # A dropped message does not count as a message that follows, so the text before it may still be the answer.
        if handling is not BodyHandling.DROP:
            output.settle(followed=True)
        opened = None
        if handling is BodyHandling.FORWARD:
            opened = OpenPart(header, self._reader.legal(self._held, header), output.closed_to, output.position)
        self._message = OpenMessage(output, self._encoding, header, handling, opened)
        self._state, self._is_first = State.BODY, False

    def _held_text(self) -> str:
        text, whole = self._reader.text(self._held)
        if not whole:
            self.output.note("undecodable-header")
        return text

    def _channel(self, token: int, rule: str | None) -> None:
        """Handle `<|channel|>` in a header: a part of it, or the next header after a missing end."""
        first = self._is_first and not self._held.role_given
        if self._is_short() and is_whole_message(respell(self._held_text(), self._reader.declared), first=first):
            self._bodyless(START, None)
            self._supply_start(token, "missing-start")
        else:
            self._held.tokens.append(token)

    def _restart(self, token: int, rule: str | None) -> None:
        """Handle `<|start|>` in a header.

        The same header begins again, or the next one begins after a message without a body.
        """
        if self._is_short() and self._is_empty():
            self._held.tokens.append(token)
        else:
            self._bodyless(token, None)
            self._open(token, None)

    def _is_short(self) -> bool:
        return self._held.may_be_short and len(self._held_text()) <= MAX_REREAD_LENGTH

    def _is_empty(self) -> bool:
        text = self._held_text()
        return not text.strip() or not self._read_bodyless(text).body

    def _read_bodyless(self, text: str) -> Header:
        return self._reader.read_bodyless(self._held, text, first=self._is_first)

    def _bodyless(self, token: int, rule: str | None) -> None:
        """Interpret the buffer as header and body in one; `token` ended it."""
        output = self.output
        header = self._read_bodyless(self._held_text())
        # A start belongs to the next message.
        start, end = output.closed_to, output.position - (token == START)
        self._note_cut_preamble()
        output.note_header(header)
        if rule is not None:
            output.note(rule)
        self._is_first, self._state = False, State.BETWEEN
        if header.dropped or (not header.body and not header.is_call):
            return
        output.settle(followed=True)
        if header.thought and token in (END, START):
            output.hold_text(header, start, end)
            output.closed_to = end
            return
        # Neither the end of the text nor the next message completes a call.
        complete = token in TERMINATORS or not header.is_call
        output.add_bodyless(header, token, start, end, complete=complete)

    def _note_cut_preamble(self) -> None:
        if self._held.cuts_preamble:
            self.output.note("missing-end")

    # -- bodies

    def _close(self, token: int, rule: str | None) -> None:
        self._state = State.BETWEEN
        self._message.close(token, self.output.position, complete=True, terminated=True)

    def _close_text(self, token: int, rule: str | None) -> None:
        self._note(rule)
        self._state = State.BETWEEN
        self._message.cut(self.output.position)

    def _cut(self, token: int, rule: str | None) -> None:
        """Handle `<|start|>` or `<|channel|>` in a body.

        The new header decides between a missing end and a call inside a preamble.
        """
        message = self._message
        if not (message.is_text and message.is_unopened):
            message.cut(self.output.position - 1)
        cuts_preamble = message.is_text and message.header.channel == COMMENTARY and token == CHANNEL
        if not cuts_preamble:
            self._note(rule)
        if token == START:
            self._start_header(HeldHeader(role_given=True))
        else:
            self._start_header(HeldHeader(is_supplied=True, cuts_preamble=cuts_preamble, tokens=[token]))

    # -- text between messages

    def _leave_gap(self, token: int, rule: str | None) -> None:
        text = self._held_text()
        if not may_be_header(text, self._reader.declared):
            self._drop_gap_text()
            self._supply_start(token, "missing-start")
            return
        self.output.note("missing-start")
        role_given = text.startswith("assistant")
        self._start_header(HeldHeader(role_given, is_supplied=True, tokens=self._held.tokens))
        self._act(token)

    def _drop_gap(self, token: int, rule: str | None) -> None:
        output = self.output
        if token == START or not self._holds_answer():
            self._drop_gap_text()
        else:
            output.settle(followed=True)
            body = without_markers(self._held_text())
            header = Header(rules=("missing-start", "missing-channel"), body=body, stray=True)
            output.hold_text(header, output.closed_to, output.position)
            self._state = State.BETWEEN
        action, _ = STEPS[State.BETWEEN, mark_of(token)]
        # The dropped text is the repair; a terminator after it belongs to it.
        if action is not GrammarAction.DROP:
            self._actions[action](token, None)

    def _holds_answer(self) -> bool:
        return not self.output.has_answer and may_be_answer(self._held_text(), self._reader.declared)

    def _drop_gap_text(self) -> None:
        self.output.note("free-text-between", dropped=len(self._held_text()))
        self._state = State.BETWEEN

    # -- end of the output

    def _restore_stop(self) -> None:
        """Read the stop token that the backend does not send."""
        if self._state is State.BODY:
            is_call = self._message.may_be_call
        elif self._state is State.HEADER and not self._is_empty():
            is_call = self._read_bodyless(self._held_text()).recipient.kind is not RecipientKind.NONE
        elif self._state is State.GAP and self._holds_answer():
            is_call = False
        else:
            return
        self.has_restored_stop = True
        self.output.note("restored-stop")
        self._act(CALL if is_call else RETURN)

    def _end_in_header(self, reason: FinishReason) -> None:
        output = self.output
        text = self._held_text()
        self._note_cut_preamble()
        if not text.strip() and (self._is_first or not text):
            return
        header = self._read_bodyless(text)
        # The start of a truncated recipient: the tokenizer splits ` to` from `=functions`.
        begun = reason is FinishReason.LENGTH and not header.thought and header.body in ("t", "to")
        if not text.strip() or not header.body or (begun and header.rules == ("header-without-message",)):
            output.note("cut-header")
            output.has_cut_call = output.has_cut_call or header.is_call or "to=functions." in text
            return
        output.note_header(header)
        if not header.dropped:
            output.settle(followed=True)
            complete = reason is FinishReason.STOP and not header.is_call
            output.add_bodyless(header, END, output.closed_to, output.position, complete=complete)

    def _end_in_body(self, reason: FinishReason) -> None:
        complete = reason is FinishReason.STOP and not self._message.header.is_call
        self._message.close(END, self.output.position, complete=complete, terminated=False)
