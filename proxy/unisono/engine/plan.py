"""The step plan: tools that have to be called, answers of a form, thoughts within a budget, and calls that are broken.

All of it is one move: stop, cut, append tokens, continue. The plan decides on moves, from what the router says of the
messages and nothing else, so that tokens read again from a journal come to the same ones; `course` carries them out. It
ends for anything a model may write: every kind of move is bounded. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from unisono.core.generation import AnyJson, Constraint, FinishReason
from unisono.engine.body_checks import CODE_FENCE, BodyChecks
from unisono.engine.move import PromptEdit
from unisono.engine.naming import ToolNaming
from unisono.engine.policy import (
    CLOSING,
    MAX_TRIMS,
    MOST_AGAIN,
    MOST_MOVES,
    OPENING,
    BodyFault,
    HeaderAction,
    MessageKind,
    Obligation,
)
from unisono.engine.policy import BodyAction as Ending
from unisono.engine.regeneration import NONE_REJECTED
from unisono.engine.spelling import HeaderSpelling
from unisono.engine.wishes import OutputRequirements, Violation, constraint_of, header_for, recipient_of
from unisono.harmony.encoding import Encoding
from unisono.harmony.gate import Stopped
from unisono.harmony.header import ANALYSIS, COMMENTARY, Header
from unisono.harmony.message_parts import OpenPart

REGENERATED_CALL: Final = "regenerated-call"
REGENERATED_ANSWER: Final = "regenerated-answer"
REPETITION: Final = "repetition"
BUDGET: Final = "reasoning-budget"
NOT_ALLOWED: Final = "tool-not-allowed"

SWITCHABLE: Final = frozenset({REGENERATED_CALL, REGENERATED_ANSWER, CODE_FENCE, REPETITION})
"""Rules that a turn may switch off."""

UNMET_CALL: Final = "The model did not call a tool that it had to call."
UNMET_NONE: Final = "None of the tools that had to be called is available."
UNMET_ARGUMENTS: Final = "The arguments of a call do not match the tool's schema."
UNMET_FORM: Final = "The answer does not have the form that was asked for."


class InterventionController:
    """For one answer. It is a router's gate, and what it decided on is its `move`."""

    def __init__(self, encoding: Encoding, wishes: OutputRequirements, violation: Violation | None) -> None:
        self._spelling = HeaderSpelling(encoding)
        self._wishes = wishes
        self._checks = BodyChecks(wishes, violation)
        self._call_owed = bool(wishes.forced)
        self._form_owed = wishes.form is not None
        self._moves = self._moves_before = self._ends = self._trims = 0
        self._attempts = NONE_REJECTED
        self._skipped = False
        self._refused = False
        self._answering = False
        self._handed = False
        self._late = False
        self.names = ToolNaming(encoding, wishes.forced or ())
        self._named_at = 0
        self.opened_to = -1
        """The place behind the header that was put there last; -1 for none."""
        self.able: frozenset[str] = frozenset()
        """The kinds of constraints that the backend keeps to."""
        self.move: PromptEdit | None = None
        """What is to be done before anything more is generated."""
        self.current = PromptEdit()
        """The one that was made last."""
        self.unmet = UNMET_NONE if wishes.forced == () else ""
        self.unfit = False
        """Whether the answer is not of the form that was asked for."""

    # -- where the answer is

    @property
    def owed(self) -> Obligation:
        return Obligation.CALL if self._call_owed else Obligation.FORM if self._form_owed else Obligation.NOTHING

    @property
    def constraint(self) -> Constraint | None:
        """What the backend is to keep to in the generation that is to come."""
        wanted = self.current.constraint
        return wanted if wanted is not None and wanted.kind in self.able else None

    @property
    def naming(self) -> bool:
        return self.current.naming

    def begin(self) -> None:
        """Another step of the answer begins."""
        self._moves_before = self._moves
        self._moves = self._ends = self._trims = 0
        self._attempts = NONE_REJECTED
        self._skipped = self._answering = self._handed = False
        # A call was made, or nothing of it is to be had any more: the rest is the model's choice.
        self._call_owed = False
        self.move, self.current, self.opened_to = None, PromptEdit(), -1

    def opened(self) -> None:
        """The step's prompt ends in the header of the answer, which the step before did not come to."""
        self._moves = self._moves_before
        self._answering, self.opened_to = True, 0
        if self._form_owed:
            self.current = PromptEdit(header=self._spelling.answer, constraint=self._form_constraint)

    @property
    def spent(self) -> bool:
        """Whether the model is left alone for the rest of the step."""
        return self._moves >= MOST_MOVES

    @property
    def handed(self) -> bool:
        """Whether a complete call was made in the step."""
        return self._handed

    @property
    def late(self) -> bool:
        """Whether the budget for thoughts is used up."""
        return self._late

    # -- the gate

    def opens(self, message: OpenPart) -> bool:
        kind = self._message(message.header)
        if kind not in (MessageKind.LATE_THOUGHT, MessageKind.THOUGHT):
            self._skipped = False
        act = OPENING[self.owed, kind]
        # Thoughts behind the opening of an answer are what the model wants there: asked again it would want them again.
        if message.end == self.opened_to or self.spent or (act is HeaderAction.SKIP and self._answering):
            return True
        if kind is MessageKind.BARRED and not self._wishes.hold_calls:
            return False
        return act is HeaderAction.PASS or (act is HeaderAction.GUIDE and not self._can_guide(message.header))

    def holds(self, header: Header) -> bool:
        # A backend that keeps to a form may break off in it all the same: a marker in a string ends the message.
        free = self.constraint is None or self._wishes.whole
        return free and self._message(header) is MessageKind.ANSWER and self.owed is Obligation.FORM

    def limits_blanks(self, header: Header) -> bool:
        message = self._message(header)
        is_json = self._has_form(message) or self._checks.is_json_call(message, header)
        return is_json and not self.spent and REPETITION not in self._wishes.unmended

    def closes(self, header: Header, text: str, *, held: bool) -> str | None:
        message = self._message(header)
        fault, says = self._checks.judged(message, header, text, has_form=self._has_form(message))
        end = CLOSING[message, fault]
        if held and not self.spent and self._is_rejected(end, message, header, text):
            return None
        self._said(message, fault)
        return says

    def _is_rejected(self, end: Ending, message: MessageKind, header: Header, text: str) -> bool:
        match end:
            case Ending.SAID:
                return False
            case Ending.REFUSE:
                return True
            case Ending.AGAIN:
                rule = REGENERATED_ANSWER if message is MessageKind.ANSWER else REGENERATED_CALL
                if rule in self._wishes.unmended or self.current.body:
                    return False
                return self._attempts.count < MOST_AGAIN or not self._attempts.is_first(header, text)

    def _said(self, message: MessageKind, fault: BodyFault) -> None:
        self._trims = 0
        if message is not MessageKind.PREAMBLE:
            self._attempts = NONE_REJECTED
        wrong = CLOSING[message, fault] is Ending.AGAIN
        if message in (MessageKind.WANTED, MessageKind.STRICT, MessageKind.CALL):
            self._handed = True
            if wrong and message is not MessageKind.CALL:
                self.unmet = UNMET_ARGUMENTS
            self._call_owed = self._call_owed and message is not MessageKind.WANTED
        elif message is MessageKind.ANSWER and self._form_owed and not self._call_owed:
            self._form_owed = False
            self.unfit = wrong
            self.unmet = UNMET_FORM if wrong else self.unmet

    # -- moments

    def stopped(self, at: Stopped) -> None:
        """The router stopped where this plan had it stop."""
        message = self._message(at.header)
        if at.trimmed is not None:
            self._trim(at, message)
        elif at.text is None:
            self._stopped_in_front(at, message)
        elif message is MessageKind.BARRED:
            self._refuse(at)
        else:
            self._once_more(at, message)

    def thought(self, place: int, *, rule: str) -> None:
        """The thoughts that go on at `place` are to end there."""
        self._late = self._late or rule == BUDGET
        if self._call_owed:
            self._force(place, rule=rule, closes=True)
        elif rule == BUDGET and self._wishes.tools:
            self.move = PromptEdit(place, closes=True, rule=rule)
        else:
            self._open_answer(place, rule=rule, closes=True)

    def exhausted(self) -> None:
        """The budget for thoughts is used up, and none is open."""
        self._late = True

    def ended(self, reason: FinishReason, place: int) -> None:
        """The generation ended; all messages end before `place`."""
        if reason is not FinishReason.STOP or self.spent:
            return
        if self._call_owed and self._ends < MOST_AGAIN:
            self._ends += 1
            self._force(place)
        elif self._form_owed and not self._handed and not self._answering:
            self._open_answer(place)

    def name(self, tokens: Sequence[int]) -> None:
        """Some more tokens of a tool's name; those behind the one that settles it say nothing."""
        for token in tokens:
            recipient, known = self.names.read(token)
            if known:
                self._named(recipient)
                return

    def name_ended(self) -> None:
        """Nothing more of a tool's name comes."""
        if self.move is None:
            self._named(self.names.found(over=True)[0])

    def made(self, move: PromptEdit, begin: int, end: int) -> None:
        """`move` is what goes on from here; the message that it opened, if any, begins at the place `begin`, and `end`
        is behind its header."""
        self._moves += 1
        if move.trims:
            self.move, self.current = None, replace(self.current, attempts=move.attempts)
            return
        self.move, self.current, self._trims = None, move, 0
        self.names.begin()
        self._named_at = begin
        self.opened_to = end if move.header else -1

    def finish(self, *, handed: bool = False) -> None:
        """Nothing more comes. `handed`: somebody else has something to do, and the answer is to come behind that."""
        if self._call_owed:
            self.unmet = self.unmet or UNMET_CALL
        elif self._form_owed and not self._handed and not handed:
            self.unmet = self.unmet or UNMET_FORM

    # -- messages

    def _message(self, header: Header) -> MessageKind:
        recipient = recipient_of(header)
        if header.is_call and self._wishes.calls_allowed:
            return self._call(recipient)
        if recipient or header.channel == ANALYSIS:
            return MessageKind.LATE_THOUGHT if self._late else MessageKind.THOUGHT
        # Without tools there is nothing that could come behind a preamble.
        return MessageKind.PREAMBLE if header.channel == COMMENTARY and self._wishes.tools else MessageKind.ANSWER

    def _call(self, recipient: str) -> MessageKind:
        wishes = self._wishes
        if self._call_owed and recipient in (wishes.forced or ()):
            return MessageKind.WANTED
        if wishes.allowed is not None and recipient not in wishes.allowed:
            return MessageKind.BARRED
        return MessageKind.STRICT if recipient in wishes.strict else MessageKind.CALL

    def _can_guide(self, header: Header) -> bool:
        constraint = self._constraint_for(header)
        return constraint is not None and constraint.kind in self.able

    def _constraint_for(self, header: Header) -> Constraint | None:
        recipient = recipient_of(header)
        if not recipient:
            return self._form_constraint
        schema = self._wishes.schemas.get(recipient)
        return None if schema is None else constraint_of(schema)

    def _has_form(self, message: MessageKind) -> bool:
        return message is MessageKind.ANSWER and self._wishes.form is not None and self.owed is Obligation.FORM

    # -- moves

    def _stopped_in_front(self, at: Stopped, message: MessageKind) -> None:
        act = OPENING[self.owed, message]
        if act is HeaderAction.FORCE:
            self._force(at.begin, rule=BUDGET if message is MessageKind.LATE_THOUGHT else "")
        elif message is MessageKind.BARRED:
            self._open_answer(at.begin, rule=NOT_ALLOWED)
        elif act is HeaderAction.GUIDE and message is MessageKind.ANSWER:
            self._open_answer(at.begin)
        elif act is HeaderAction.GUIDE:
            self.move = PromptEdit(at.begin, self._spelling.written(at), constraint=self._constraint_for(at.header))
        elif self._skipped or not self._wishes.tools:
            self._open_answer(at.begin, rule=BUDGET)
        else:
            self._skipped = True
            self.move = PromptEdit(at.begin, between=self._spelling.empty(at), rule=BUDGET)

    def _force(self, place: int, *, rule: str = "", closes: bool = False) -> None:
        """Open the call that is owed, or the beginning of one when there are several to choose from."""
        forced = self._wishes.forced or ()
        if len(forced) == 1:
            header = header_for(forced[0])
            tokens = self._spelling.header(header)
            constraint = self._constraint_for(header)
            self.move = PromptEdit(place, tokens, closes=closes, constraint=constraint, rule=rule)
            return
        naming = self.names
        move = PromptEdit(place, naming.header, closes=closes, constraint=naming.choices, naming=True, rule=rule)
        self.move = replace(move, attempts=self._attempts)

    def _named(self, recipient: str | None) -> None:
        """The tool is known that is to be called; or none is called that, and the model is asked again, and at last
        left alone."""
        if recipient is not None:
            header = header_for(recipient)
            self._attempts = NONE_REJECTED
            self.move = PromptEdit(
                self._named_at, self._spelling.header(header), constraint=self._constraint_for(header)
            )
        elif self._attempts.count < MOST_AGAIN:
            self._attempts = self._attempts.reject(self.names.text, constrained=self.constraint is not None)
            self._force(self._named_at)
        else:
            self._call_owed, self.unmet, self._attempts = False, UNMET_CALL, NONE_REJECTED
            self.move = PromptEdit(self._named_at)

    def _open_answer(self, place: int, *, rule: str = "", closes: bool = False) -> None:
        self._answering = True
        constraint = self._form_constraint if self.owed is Obligation.FORM else None
        self.move = PromptEdit(place, self._spelling.answer, closes=closes, constraint=constraint, rule=rule)

    def _once_more(self, at: Stopped, message: MessageKind) -> None:
        if self._attempts.count == MOST_AGAIN:
            self._restore_first(at.begin)
            return
        constrained = self.constraint is not None and at.header_end == self.opened_to
        self._attempts = self._attempts.reject(at.text or "", constrained=constrained, at=at)
        rule = REGENERATED_ANSWER if message is MessageKind.ANSWER else REGENERATED_CALL
        constraint = self._constraint_for(at.header)
        free = message is MessageKind.CALL and not self._can_guide(at.header)
        header = () if free else self._spelling.written(at)
        self.move = PromptEdit(at.begin, header, constraint=constraint, attempts=self._attempts, rule=rule)

    def _trim(self, at: Stopped, message: MessageKind) -> None:
        """Remove a run of blanks, and complete the message, continue it, regenerate it or end the answer."""
        self._trims += 1
        is_last = self._trims > MAX_TRIMS and not at.is_complete
        rule = REGENERATED_ANSWER if message is MessageKind.ANSWER else REGENERATED_CALL
        can_regenerate = not at.is_shown and rule not in self._wishes.unmended
        if is_last and can_regenerate and self._attempts.count < MOST_AGAIN:
            self._once_more(at, message)
            return
        constrained = self.constraint is not None and self._trims == 1
        attempts = self.current.attempts.reject(at.text or "", constrained=constrained)
        body = self._spelling.body(at) if at.is_complete else at.trimmed or ()
        self.move = PromptEdit(at.header_end, body=body, attempts=attempts, trims=True, ends=is_last, rule=REPETITION)

    def _restore_first(self, place: int) -> None:
        """Put the first attempt at `place`: no retry is better, and it has the client's own sampling."""
        first = self._attempts.first
        assert first is not None
        self.move = PromptEdit(place, self._spelling.written(first), body=self._spelling.body(first))

    def _refuse(self, at: Stopped) -> None:
        """The call stands where the model can read it, with an answer that says why nothing came of it."""
        if self._refused:
            self._open_answer(at.begin, rule=NOT_ALLOWED)
            return
        self._refused = True
        self.move = PromptEdit(at.begin, between=self._spelling.refused(at), rule=NOT_ALLOWED)

    @property
    def _form_constraint(self) -> Constraint:
        form = self._wishes.form
        return AnyJson() if form is None else constraint_of(form.schema)
