"""Repair of generated tokens to well-formed Harmony, with a named rule for every repair.

The output is a sequence of messages: `OpenPart` with a legal header, `BodyPart` of ordinary text, `ClosedPart`
with a terminator. `OpenPart` waits for the first body token, since an empty preamble may be the beginning of a
call. Work is linear in the tokens. At most one header is buffered, or one message that its end decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from unisono.core.events import Repaired
from unisono.core.generation import CALL, CHANNEL, END, FIRST_SPECIAL, RETURN, START, FinishReason
from unisono.harmony.candidates import decide
from unisono.harmony.encoding import Encoding
from unisono.harmony.grammar import STEPS, GrammarAction, State, mark_of
from unisono.harmony.header import ANALYSIS, COMMENTARY, FINAL, Header
from unisono.harmony.held_header import MAX_REREAD_LENGTH, HeldHeader
from unisono.harmony.incomplete_header import is_whole_message, may_be_answer, may_be_header, without_markers
from unisono.harmony.message_parts import BodyPart, ClosedPart, Legal, OpenPart
from unisono.harmony.recipients import NOBODY, RecipientKind, respell

_TERMINATORS = frozenset({END, RETURN, CALL})


class Repair:
    """State machine that repairs generated tokens, split into any portions.

    `declared` are the wire names of the offered tools, None if unknown; `builtins` are the offered tools of
    gpt-oss's training. `opening` is the header of a message that the prompt leaves open (a prefill, a forced
    header); without it the prompt ends in `<|start|>assistant`. `answered` means that the prompt holds an
    answer or a call of the same step. Tokens never cause an exception."""

    def __init__(
        self,
        encoding: Encoding,
        declared: frozenset[str] | None,
        opening: Header | None = None,
        builtins: frozenset[str] = frozenset(),
        *,
        answered: bool = False,
    ) -> None:
        self._encoding = encoding
        self._declared = declared
        self.position = 0  # tokens fed so far
        self.origin = 0  # `position` at position 0 of `message_parts`
        self.closed_to = 0  # position after the last closed message
        self._out: list[Legal] = []
        self._run: list[int] = []
        self._state = State.HEADER if opening is None else State.BODY
        self._held = HeldHeader(encoding, declared, builtins)
        self._undecided = self._dropping = self._cut_preamble = False
        self._first = True
        self._header = opening or Header()
        self._pending: OpenPart | None = None
        self._bodies: list[int] = []
        self.thought: tuple[Header, int, int] | None = None
        self.cut_call = False  # a call was begun and never completed
        self.restored_stop = False
        self._answered = answered  # an answer or a call was closed
        self._acts: Mapping[GrammarAction, Callable[[int, str | None], None]] = {
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
        for token in tokens:
            self.position += 1
            if self._state is State.BODY and 0 <= token < FIRST_SPECIAL:
                self._run.append(token)
            else:
                self._take(token)
        self._flush()
        out, self._out = self._out, []
        return out

    def end(self, reason: FinishReason, *, stop_hidden: bool = False) -> list[Legal]:
        """Finish the output; `stop_hidden` restores the stop that the backend never sends."""
        if stop_hidden and reason is FinishReason.STOP:
            self._restore_stop()
        self._flush()
        complete = self._state is not State.GAP or reason is FinishReason.STOP
        if self._state is State.GAP:
            self._drop_gap(END, None)
        elif self._state is State.HEADER:
            self._end_in_header(reason)
        elif self._state is State.BODY:
            self._end_in_body(reason)
        self._settle_thought(more=False, complete=complete)
        self._state = State.BETWEEN
        out, self._out = self._out, []
        return out

    # -- actions of tokens

    def _take(self, token: int) -> None:
        self._flush()
        step, rule = STEPS[self._state, mark_of(token)]
        self._acts[step](token, rule)

    def _note(self, rule: str, dropped: int = 0) -> None:
        self._out.append(Repaired(rule, self.position, dropped))

    def _note_all(self, header: Header) -> None:
        for rule in header.rules:
            self._note(rule, dropped=header.lost if rule == "stray-header-words" else 0)

    def _pass(self, token: int, rule: str | None) -> None:
        self._run.append(token)

    def _drop(self, token: int, rule: str | None) -> None:
        assert rule is not None
        self._note(rule)

    def _hold(self, token: int, rule: str | None) -> None:
        if self._state is State.BETWEEN:
            self._state, self._held.tokens = State.GAP, []
        self._held.tokens.append(token)

    def _open(self, token: int, rule: str | None) -> None:
        self._begin_header(role_given=True)

    def _supply_start(self, token: int, rule: str | None) -> None:
        assert rule is not None
        self._note(rule)
        self._begin_header(role_given=False, supplied=True)
        self._take(token)

    def _begin_header(self, *, role_given: bool, supplied: bool = False) -> None:
        self._state = State.HEADER
        self._held.begin(role_given=role_given, supplied=supplied)

    # -- headers

    def _resolve(self, token: int, rule: str | None) -> None:
        header = self._held.read(self._held_text())
        if self._cut_preamble:
            calls = header.recipient.kind is not RecipientKind.NONE
            self._note("embedded-call" if calls else "missing-end")
            self._cut_preamble = False
        self._note_all(header if header.if_json is None else Header())
        self._state, self._first = State.BODY, False
        self._header = header
        self._dropping = header.dropped and header.if_called is NOBODY
        if not self._dropping:
            self._settle_thought(more=True)
        self._undecided = header.if_called is not NOBODY or header.if_json is not None
        self._bodies = []
        self._pending = None if self._dropping or self._undecided else self._opened(header)
        self._held.tokens = []

    def _opened(self, header: Header) -> OpenPart:
        return OpenPart(header, self._held.legal(header), self.closed_to, self._place)

    @property
    def _place(self) -> int:
        return self.position - self.origin

    def _held_text(self) -> str:
        text, whole = self._held.text()
        if not whole:
            self._note("undecodable-header")
        return text

    def _channel(self, token: int, rule: str | None) -> None:
        first = self._first and not self._held.role_given
        if self._is_short() and is_whole_message(respell(self._held_text(), self._declared), first=first):
            self._bodyless(START, None)
            self._supply_start(token, "missing-start")
        else:
            self._held.tokens.append(token)

    def _is_short(self) -> bool:
        return self._held.may_be_short and len(self._held_text()) <= MAX_REREAD_LENGTH

    def _restart(self, token: int, rule: str | None) -> None:
        if self._is_short() and self._says_nothing():
            self._held.tokens.append(token)
        else:
            self._bodyless(token, None)
            self._open(token, None)

    def _says_nothing(self) -> bool:
        text = self._held_text()
        return not text.strip() or not self._held.read_bodyless(text, first=self._first).body

    def _bodyless(self, token: int, rule: str | None) -> None:
        header = self._held.read_bodyless(self._held_text(), first=self._first)
        # A start belongs to the next message.
        begin, end = self.closed_to, self._place - (token == START)
        self._leave_preamble()
        self._note_all(header)
        if rule is not None:
            self._note(rule)
        self._first, self._state = False, State.BETWEEN
        if header.dropped or (not header.body and not header.is_call):
            return
        self._settle_thought(more=True)
        if header.thought and token in (END, START):
            self.thought, self.closed_to = (header, begin, end), end
            return
        # Neither the end of the text nor the next message completes a call.
        self._whole(header, token, begin, end, complete=token in _TERMINATORS or not header.is_call)

    def _whole(self, header: Header, token: int, begin: int, end: int, *, complete: bool = True) -> None:
        if header.is_call and not complete:
            self._cut_a_call()
            return
        body = self._encoding.encode_generated(header.body)
        self._put(header, body, ClosedPart(token if token in _TERMINATORS else END, complete, end), begin)
        self.closed_to = end

    def _put(self, header: Header, body: Sequence[int], shut: ClosedPart, begin: int) -> None:
        self._out.append(OpenPart(header, self._held.spelled(header), begin, shut.end, is_whole=True))
        self._out += [BodyPart(body)] if body else []
        self._close_item(header, shut)

    def _close_item(self, header: Header, shut: ClosedPart) -> None:
        self._out.append(shut)
        self._answered = self._answered or header.is_answer

    def _settle_thought(self, *, more: bool, complete: bool = True) -> None:
        """Settle text without a channel: it is the answer if nothing follows.

        Otherwise it is reasoning, or is dropped if it had no header."""
        if self.thought is None:
            return
        (header, begin, end), self.thought = self.thought, None
        if header.stray and more:
            self._note("free-text-between", dropped=len(header.body))
        else:
            # The rules of other reasoning were noted with its headers.
            self._note_all(header if header.stray else Header())
            self._whole(replace(header, channel=ANALYSIS if more else FINAL), END, begin, end, complete=complete)

    # -- bodies

    def _flush(self) -> None:
        if not self._run:
            return
        run, self._run = self._run, []
        if self._dropping or self._undecided:
            self._bodies += run
            return
        self._release()
        self._out.append(BodyPart(run))

    def _release(self) -> None:
        if self._pending is not None:
            self._out.append(self._pending)
            self._pending = None

    def _close(self, token: int, rule: str | None) -> None:
        self._shut(token, complete=True, terminated=True)

    def _close_text(self, token: int, rule: str | None) -> None:
        assert rule is not None
        self._note(rule)
        self._shut(END, complete=not self._header.is_call)

    def _shut(self, token: int, *, complete: bool, terminated: bool = False, next_begun: bool = False) -> None:
        self._state = State.BETWEEN
        end = self._place - next_begun
        if self._dropping:
            self._note("foreign-role", dropped=len(self._encoding.decode(self._bodies)))
        elif self._undecided:
            self._decide(token, end, complete=complete, terminated=terminated)
        else:
            self._release()
            if self._header.is_call and not complete:
                self._cut_a_call()
            self._close_item(self._header, ClosedPart(token, complete, end))
        self._dropping = self._undecided = False
        self._bodies = []
        self.closed_to = end if complete or not self._header.is_call else self.closed_to

    def _decide(self, token: int, end: int, *, complete: bool, terminated: bool) -> None:
        text = self._encoding.decode(self._bodies)
        header = decide(self._header, text, token, terminated=terminated)
        if self._header.if_json is not None:
            self._note_all(header)
        if header.is_call and not terminated:
            self._cut_a_call()
        elif header.dropped:
            self._note("foreign-role", dropped=len(text))
        else:
            self._put(header, self._bodies, ClosedPart(token, complete, end), self.closed_to)

    def _cut(self, token: int, rule: str | None) -> None:
        """Handle `<|start|>` or `<|channel|>` in a body.

        The new header decides between a missing end and a call inside a preamble."""
        preamble = not self._dropping and not self._undecided and self._header.recipient.kind is RecipientKind.NONE
        if preamble and self._pending is not None:
            self._pending = None
            self._state = State.BETWEEN
        else:
            self._shut(END, complete=not self._header.is_call, next_begun=True)
        if preamble and self._header.channel == COMMENTARY and token == CHANNEL:
            self._cut_preamble = True
        else:
            assert rule is not None
            self._note(rule)
        self._begin_header(role_given=token == START, supplied=token == CHANNEL)
        if token == CHANNEL:
            self._held.tokens.append(token)

    def _leave_preamble(self) -> None:
        if self._cut_preamble:
            self._note("missing-end")
            self._cut_preamble = False

    def _cut_a_call(self) -> None:
        self.cut_call = True
        self._note("unfinished-call")

    # -- text between messages

    def _leave_gap(self, token: int, rule: str | None) -> None:
        text = self._held_text()
        if not may_be_header(text, self._declared):
            self._drop_gap_text()
            self._supply_start(token, "missing-start")
            return
        self._note("missing-start")
        self._state, self._held.supplied = State.HEADER, True
        self._held.role_given = text.startswith("assistant")
        self._take(token)

    def _drop_gap(self, token: int, rule: str | None) -> None:
        if token == START or not self._holds_answer():
            self._drop_gap_text()
        else:
            self._settle_thought(more=True)
            header = Header(
                rules=("missing-start", "missing-channel"), body=without_markers(self._held_text()), stray=True
            )
            self.thought = (header, self.closed_to, self._place)
            self._state, self._held.tokens = State.BETWEEN, []
        step, _ = STEPS[State.BETWEEN, mark_of(token)]
        # The dropped text is the repair; a terminator after it belongs to it.
        if step is not GrammarAction.DROP:
            self._acts[step](token, None)

    def _holds_answer(self) -> bool:
        return not self._answered and may_be_answer(self._held_text(), self._declared)

    def _drop_gap_text(self) -> None:
        self._note("free-text-between", dropped=len(self._held_text()))
        self._state, self._held.tokens = State.BETWEEN, []

    def _restore_stop(self) -> None:
        if self._state is State.BODY:
            call = self._header.recipient.kind is not RecipientKind.NONE or self._undecided
        elif self._state is State.HEADER and not self._says_nothing():
            call = (
                self._held.read_bodyless(self._held_text(), first=self._first).recipient.kind is not RecipientKind.NONE
            )
        elif self._state is State.GAP and self._holds_answer():
            call = False
        else:
            return
        self.restored_stop = True
        self._note("restored-stop")
        self._take(CALL if call else RETURN)

    def _end_in_header(self, reason: FinishReason) -> None:
        text = self._held_text()
        self._leave_preamble()
        if not text.strip() and (self._first or not text):
            return
        header = self._held.read_bodyless(text, first=self._first)
        # The start of a truncated recipient: the tokenizer splits ` to` from `=functions`.
        begun = reason is FinishReason.LENGTH and not header.thought and header.body in ("t", "to")
        if not text.strip() or not header.body or (begun and header.rules == ("header-without-message",)):
            self._note("cut-header")
            self.cut_call = self.cut_call or header.is_call or "to=functions." in text
            return
        self._note_all(header)
        if not header.dropped:
            self._settle_thought(more=True)
            complete = reason is FinishReason.STOP and not header.is_call
            self._whole(header, END, self.closed_to, self._place, complete=complete)

    def _end_in_body(self, reason: FinishReason) -> None:
        self._shut(END, complete=reason is FinishReason.STOP and not self._header.is_call)
