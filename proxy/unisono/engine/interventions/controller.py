"""Interventions: forced calls, required answer forms, reasoning budgets and invalid calls.

Every intervention is one prompt edit: stop, cut, append tokens, continue. The controller decides on edits from the
router's messages alone, so that replaying a journal leads to the same edits. The transcript carries them out. The
number of edits of every kind is limited, so that every answer ends. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from unisono.core.generation import AnyJson, Constraint, FinishReason
from unisono.core.ports import Violation
from unisono.engine.interventions.policy import (
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
from unisono.engine.interventions.policy import BodyAction as Ending
from unisono.engine.interventions.prompt_edit import NONE_REJECTED, HeaderSpelling, PromptEdit
from unisono.engine.interventions.requirements import CODE_FENCE, BodyChecks, OutputRequirements, constraint_of
from unisono.engine.interventions.tool_names import ToolNaming, header_for, recipient_of
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
"""Rules that a request may switch off."""

UNMET_CALL: Final = "The model did not call a tool that it had to call."
UNMET_NONE: Final = "None of the tools that had to be called is available."
UNMET_ARGUMENTS: Final = "The arguments of a call do not match the tool's schema."
UNMET_FORM: Final = "The answer does not have the form that was asked for."


class InterventionController:
    """Interventions for one answer.

    The controller is the router's gate; its decision is the pending edit `move`.
    """

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
        self.opened_to = -1  # position after the header that was inserted last; -1 for none
        self.able: frozenset[str] = frozenset()  # constraint kinds that the backend enforces
        self.move: PromptEdit | None = None  # pending prompt edit, to be made before anything else is generated
        self.current = PromptEdit()  # the prompt edit that was made last
        self.unmet = UNMET_NONE if wishes.forced == () else ""
        self.unfit = False  # the answer does not have the required form

    # -- state of the answer

    @property
    def owed(self) -> Obligation:
        return Obligation.CALL if self._call_owed else Obligation.FORM if self._form_owed else Obligation.NOTHING

    @property
    def constraint(self) -> Constraint | None:
        """Return the constraint that the backend has to enforce in the next generation."""
        wanted = self.current.constraint
        return wanted if wanted is not None and wanted.kind in self.able else None

    @property
    def naming(self) -> bool:
        return self.current.naming

    def begin(self) -> None:
        """Reset the state for another step of the answer."""
        self._moves_before = self._moves
        self._moves = self._ends = self._trims = 0
        self._attempts = NONE_REJECTED
        self._skipped = self._answering = self._handed = False
        # A call was made, or none can be made any more: the model chooses the rest.
        self._call_owed = False
        self.move, self.current, self.opened_to = None, PromptEdit(), -1

    def opened(self) -> None:
        """Begin a step whose prompt ends in an answer header, because the last one gave no answer."""
        self._moves = self._moves_before
        self._answering, self.opened_to = True, 0
        if self._form_owed:
            self.current = PromptEdit(header=self._spelling.answer, constraint=self._form_constraint)

    @property
    def spent(self) -> bool:
        """Return whether no more interventions are made in this step."""
        return self._moves >= MOST_MOVES

    @property
    def handed(self) -> bool:
        """Return whether a complete call was made in the step."""
        return self._handed

    @property
    def late(self) -> bool:
        """Return whether the reasoning budget is used up."""
        return self._late

    # -- router gate

    def opens(self, message: OpenPart) -> bool:
        kind = self._message(message.header)
        if kind not in (MessageKind.LATE_THOUGHT, MessageKind.THOUGHT):
            self._skipped = False
        act = OPENING[self.owed, kind]
        # Reasoning after an opened answer header is the model's decision: another attempt would lead to it again.
        if message.end == self.opened_to or self.spent or (act is HeaderAction.SKIP and self._answering):
            return True
        if kind is MessageKind.BARRED and not self._wishes.hold_calls:
            return False
        return act is HeaderAction.PASS or (act is HeaderAction.GUIDE and not self._can_guide(message.header))

    def holds(self, header: Header) -> bool:
        # A backend that enforces a form may still break it off: a marker inside a string ends the message.
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

    # -- events

    def stopped(self, at: Stopped) -> None:
        """Decide what follows after the router stopped at a message of this controller."""
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
        """End the open reasoning at `place`."""
        self._late = self._late or rule == BUDGET
        if self._call_owed:
            self._force(place, rule=rule, closes=True)
        elif rule == BUDGET and self._wishes.tools:
            self.move = PromptEdit(place, closes=True, rule=rule)
        else:
            self._open_answer(place, rule=rule, closes=True)

    def exhausted(self) -> None:
        """Note that the reasoning budget is used up while no reasoning is open."""
        self._late = True

    def ended(self, reason: FinishReason, place: int) -> None:
        """Decide what follows a generation that ended; all messages end before `place`."""
        if reason is not FinishReason.STOP or self.spent:
            return
        if self._call_owed and self._ends < MOST_AGAIN:
            self._ends += 1
            self._force(place)
        elif self._form_owed and not self._handed and not self._answering:
            self._open_answer(place)

    def name(self, tokens: Sequence[int]) -> None:
        """Read more tokens of a tool's name; tokens after the decisive one are ignored."""
        for token in tokens:
            recipient, known = self.names.read(token)
            if known:
                self._named(recipient)
                return

    def name_ended(self) -> None:
        """Decide on the tool whose name ended."""
        if self.move is None:
            self._named(self.names.found(over=True)[0])

    def made(self, move: PromptEdit, begin: int, end: int) -> None:
        """Record that the edit `move` was made.

        `begin` is the position of the message that it opened, if any; `end` is the position after its header.
        """
        self._moves += 1
        if move.trims:
            self.move, self.current = None, replace(self.current, attempts=move.attempts)
            return
        self.move, self.current, self._trims = None, move, 0
        self.names.begin()
        self._named_at = begin
        self.opened_to = end if move.header else -1

    def finish(self, *, handed: bool = False) -> None:
        """Record unmet requirements at the end of the answer.

        `handed`: the client has calls or approvals to process, and the answer follows in another request.
        """
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
        # Without tools, nothing can follow a preamble.
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

    # -- prompt edits

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
        """Open the required call, or the beginning of a call if several tools are possible."""
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
        """Open the call of the chosen tool, or let the model choose again if it named none.

        After the last attempt the requirement is dropped.
        """
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
        """Remove a run of blanks; complete, continue or regenerate the message, or end the answer."""
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
        """Restore the first attempt at `place`.

        No retry is better, and the first one has the client's own sampling.
        """
        first = self._attempts.first
        assert first is not None
        self.move = PromptEdit(place, self._spelling.written(first), body=self._spelling.body(first))

    def _refuse(self, at: Stopped) -> None:
        """Insert the call with an error result that the model can read.

        The second time, open the answer instead.
        """
        if self._refused:
            self._open_answer(at.begin, rule=NOT_ALLOWED)
            return
        self._refused = True
        self.move = PromptEdit(at.begin, between=self._spelling.refused(at), rule=NOT_ALLOWED)

    @property
    def _form_constraint(self) -> Constraint:
        form = self._wishes.form
        return AnyJson() if form is None else constraint_of(form.schema)
