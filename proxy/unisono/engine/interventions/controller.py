"""Interventions: forced calls, required answer forms, reasoning budgets and invalid calls.

Every intervention is a prompt edit: stop reading, cut tokens from the end of the prompt, append other tokens, and
continue the generation. The controller decides only from the messages that the router parsed, so the replay of a
journal leads to the same edits. The transcript applies the edits. The number of edits of each kind is limited, so that
every answer ends. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from unisono.core.generation import Constraint, FinishReason
from unisono.core.recovery_rules import (
    REASONING_BUDGET,
    REGENERATED_ANSWER,
    REGENERATED_CALL,
    REPETITION,
    TOOL_NOT_ALLOWED,
    UNDECLARED_TOOL,
)
from unisono.engine.interventions.policy import (
    MAX_EDITS,
    MAX_REGENERATIONS,
    MAX_TRIMS,
    OPENING,
    REFUSED,
    HeaderAction,
    MessageKind,
)
from unisono.engine.interventions.prompt_edit import (
    NONE_REJECTED,
    NOT_AVAILABLE,
    HeaderSpelling,
    PromptEdit,
    StepInterventions,
    ToolNaming,
    header_for,
    no_such_tool,
)
from unisono.engine.interventions.requirements import Duty, Obligations, OutputRequirements
from unisono.harmony.encoding import Encoding
from unisono.harmony.gate_protocol import Stopped
from unisono.harmony.header import Header


class InterventionController:
    """Interventions for one answer.

    A decision is stored as the pending edit of `step`. `MessageGate` stops the router where the controller must decide.
    In the methods, `place` is the number of tail tokens before the edit, and `rule` is the recovery rule to report.
    """

    def __init__(self, encoding: Encoding, requirements: OutputRequirements) -> None:
        self._encoding = encoding
        self._spelling = HeaderSpelling(encoding)
        self.requirements = requirements
        self.obligations = Obligations(requirements)
        self.found: Sequence[str] = ()  # functions that searches found during the answer
        self.has_call_as_text = False  # a call to an undeclared tool was emitted as text
        self.step = StepInterventions()
        self.enforced_kinds: frozenset[str] = frozenset()  # constraint kinds that the backend enforces

    @cached_property
    def tool_naming(self) -> ToolNaming:
        """Reader of the name that the model chooses among the required tools."""
        return ToolNaming(self._encoding, self.requirements.tools.forced or ())

    # -- state of the answer

    @property
    def constraint(self) -> Constraint | None:
        """Return the constraint that the backend has to enforce in the next generation, or None."""
        wanted = self.step.last.constraint
        return wanted if wanted is not None and wanted.kind in self.enforced_kinds else None

    def can_guide(self, header: Header) -> bool:
        """Return whether the backend can enforce the constraint for a message with this header."""
        constraint = self.requirements.constraint_for(header)
        return constraint is not None and constraint.kind in self.enforced_kinds

    def start_step(self) -> None:
        """Reset the state for another step of the answer."""
        self.step = StepInterventions(edits_before=self.step.edits)
        self.obligations.end_step()

    def start_final(self) -> None:
        """Begin a step whose prompt ends with an answer's header, after a step without an answer."""
        self.step = StepInterventions(edits=self.step.edits_before, is_answering=True, header_end=0)
        if self.obligations.form is Duty.OWED:
            self.step.last = PromptEdit(header=self._spelling.answer, constraint=self.requirements.form_constraint)

    @property
    def is_spent(self) -> bool:
        """Return whether this step allows no more interventions."""
        return self.step.edits >= MAX_EDITS

    # -- events

    def handle_stop(self, at: Stopped) -> None:
        """Choose the edit after the gate has stopped the router at a message."""
        message = self.obligations.message_kind(at.header)
        if at.trimmed is not None:
            self._trim(at, message)
        elif at.text is None:
            self._handle_header(at, message)
        elif message in REFUSED:
            self._refuse(at, TOOL_NOT_ALLOWED if message is MessageKind.BARRED else UNDECLARED_TOOL)
        else:
            self._regenerate(at, message)

    def handle_spent_budget(self, place: int, *, is_reasoning: bool) -> bool:
        """Choose the edit when the reasoning budget is used up; return whether reading stops.

        `is_reasoning`: the tail ends inside reasoning.
        """
        if is_reasoning:
            self._end_reasoning(place, rule=REASONING_BUDGET)
        # Outside reasoning, nothing has to be ended now. The gate stops the next reasoning message at its header.
        self.obligations.is_late = True
        return is_reasoning

    def handle_repetition(self, place: int, *, is_reasoning: bool) -> bool:
        """Choose the edit after a repetition; return False if the answer has to end instead."""
        # After repetitive reasoning, the model can still answer. After a repetitive answer, the answer ends, because
        # the model would probably repeat itself in every further attempt.
        if not is_reasoning or self.is_spent:
            return False
        self._end_reasoning(place, rule=REPETITION)
        return True

    def _end_reasoning(self, place: int, *, rule: str) -> None:
        """Choose the edit that ends the unfinished reasoning."""
        self.obligations.is_late = self.obligations.is_late or rule == REASONING_BUDGET
        if self.obligations.call is Duty.OWED:
            self._force(place, rule=rule, closes=True)
        elif rule == REASONING_BUDGET and self.requirements.tools.offered:
            self.step.pending = PromptEdit(place, closes=True, rule=rule)
        else:
            self._open_answer(place, rule=rule, closes=True)

    def handle_end(self, reason: FinishReason, place: int) -> None:
        """Choose the edit after a generation has ended; `place` is the end of the last message."""
        # A generation that reached its limit has no room for another message.
        if reason is not FinishReason.STOP or self.is_spent:
            return
        if self.obligations.call is Duty.OWED and self.step.regenerations_at_end < MAX_REGENERATIONS:
            self.step.regenerations_at_end += 1
            self._force(place)
        elif self.obligations.form is Duty.OWED and not self.step.has_call:
            if preamble := self.obligations.last_resort(is_answering=self.step.is_answering):
                self.step.pending = self._spelling.answer_with(preamble, place)
            elif not self.step.is_answering:
                self._open_answer(place)

    def read_name(self, tokens: Sequence[int], place: int) -> int:
        """Read more tokens of a tool name; return how many of the tokens belong to the name.

        `place` is the position at which the message with this recipient begins.
        """
        for read, token in enumerate(tokens, 1):
            recipient, known = self.tool_naming.read(token)
            if known:
                self._open_named(recipient, place)
                return read
        return len(tokens)

    def end_name(self, place: int) -> None:
        """Choose the edit when the generation of a tool name has ended."""
        if self.step.pending is None:
            self._open_named(self.tool_naming.found(is_complete=True)[0], place)

    def record_edit(self, edit: PromptEdit, end: int) -> None:
        """Record that an edit was applied; `end` is the tail position after its header, if any."""
        self.step.edits += 1
        if edit.trims:
            self.step.pending, self.step.last = None, replace(self.step.last, attempts=edit.attempts)
            return
        self.step.pending, self.step.last, self.step.trims = None, edit, 0
        self.tool_naming.reset()
        self.step.header_end = end if edit.header else -1

    def finish(self, *, handed: bool, is_stopped: bool) -> None:
        """Record unmet requirements; the parameters are those of `Obligations.finish`."""
        self.obligations.finish(has_call=self.step.has_call, handed=handed, is_stopped=is_stopped)

    # -- prompt edits

    def _handle_header(self, at: Stopped, message: MessageKind) -> None:
        act = OPENING[self.obligations.next, message]
        if act is HeaderAction.FORCE:
            self._force(at.start, rule=REASONING_BUDGET if message is MessageKind.LATE_THOUGHT else "")
        elif act is HeaderAction.GUIDE and message is MessageKind.ANSWER:
            self._open_answer(at.start)
        elif act is HeaderAction.GUIDE:
            self.step.pending = PromptEdit(
                at.start, self._spelling.written(at), constraint=self.requirements.constraint_for(at.header)
            )
        elif self.step.has_skipped or not self.requirements.tools.offered:
            self._open_answer(at.start, rule=REASONING_BUDGET)
        else:
            self.step.has_skipped = True
            self.step.pending = PromptEdit(at.start, between=self._spelling.empty(at), rule=REASONING_BUDGET)

    def _force(self, place: int, *, rule: str = "", closes: bool = False) -> None:
        """Open the required call; with several possible tools, let the model complete the name."""
        forced = self.requirements.tools.forced or ()
        if len(forced) == 1:
            header = self._header_for(forced[0])
            tokens = self._spelling.header(header)
            constraint = self.requirements.constraint_for(header)
            self.step.pending = PromptEdit(place, tokens, closes=closes, constraint=constraint, rule=rule)
            return
        naming = self.tool_naming
        edit = PromptEdit(place, naming.header, closes=closes, constraint=naming.choices, naming=True, rule=rule)
        self.step.pending = replace(edit, attempts=self.step.attempts)

    def _open_named(self, recipient: str | None, place: int) -> None:
        """Open the call to the chosen tool; if `recipient` is None, let the model choose again.

        `recipient` is None if the model named no possible tool. After the last attempt, no call is required any more.
        """
        if recipient is not None:
            header = self._header_for(recipient)
            self.step.attempts = NONE_REJECTED
            self.step.pending = PromptEdit(
                place, self._spelling.header(header), constraint=self.requirements.constraint_for(header)
            )
        elif self.step.attempts.count < MAX_REGENERATIONS:
            self.step.attempts = self.step.attempts.reject(
                self.tool_naming.text, constrained=self.constraint is not None
            )
            self._force(place)
        else:
            self.obligations.drop_call()
            self.step.attempts = NONE_REJECTED
            self.step.pending = PromptEdit(place)

    def _header_for(self, recipient: str) -> Header:
        return header_for(recipient, is_text=recipient in self.requirements.tools.texts)

    def _open_answer(self, place: int, *, rule: str = "", closes: bool = False) -> None:
        self.step.is_answering = True
        constraint = self.requirements.form_constraint if self.obligations.form is Duty.OWED else None
        self.step.pending = PromptEdit(place, self._spelling.answer, closes=closes, constraint=constraint, rule=rule)

    def _regenerate(self, at: Stopped, message: MessageKind) -> None:
        if self.step.attempts.count == MAX_REGENERATIONS:
            # All attempts were invalid. The first attempt is used, because it has the client's own sampling.
            self.step.pending = self._spelling.first_of(self.step.attempts, at.start)
            return
        constrained = self.constraint is not None and at.header_end == self.step.header_end
        self.step.attempts = self.step.attempts.reject(at.text or "", constrained=constrained, at=at)
        rule = REGENERATED_ANSWER if message is MessageKind.ANSWER else REGENERATED_CALL
        constraint = self.requirements.constraint_for(at.header)
        # If no constraint can be enforced, the same header would probably lead to the same fault. The model then
        # chooses the header, and may choose a different tool.
        free = message is MessageKind.CALL and not self.can_guide(at.header)
        header = () if free else self._spelling.written(at)
        self.step.pending = PromptEdit(at.start, header, constraint=constraint, attempts=self.step.attempts, rule=rule)

    def _trim(self, at: Stopped, message: MessageKind) -> None:
        """Choose the edit after too much whitespace in JSON: go on, regenerate, or end the answer."""
        self.step.trims += 1
        is_last = self.step.trims > MAX_TRIMS and not at.is_complete
        rule = REGENERATED_ANSWER if message is MessageKind.ANSWER else REGENERATED_CALL
        can_regenerate = not at.is_emitted and rule not in self.requirements.disabled_rules
        if is_last and can_regenerate and self.step.attempts.count < MAX_REGENERATIONS:
            self._regenerate(at, message)
            return
        constrained = self.constraint is not None and self.step.trims == 1
        attempts = self.step.last.attempts.reject(at.text or "", constrained=constrained)
        body = self._spelling.body(at) if at.is_complete else at.trimmed or ()
        self.step.pending = PromptEdit(
            at.header_end, body=body, attempts=attempts, trims=True, ends=is_last, rule=REPETITION
        )

    def _refuse(self, at: Stopped, rule: str) -> None:
        """Choose the edit after a call that must not be emitted as a call.

        The first time, the call stays in the prompt with an error result. The second time, an answer is opened if a
        form is still required, or the tool is not allowed and no answer was opened. Otherwise, the call becomes text.
        """
        is_barred = rule == TOOL_NOT_ALLOWED
        if rule not in self.step.refusals and not self.is_spent:
            self.step.refusals |= {rule}
            tools, name = (*self.requirements.tools.offered, *self.found), at.header.recipient.full_name
            result = NOT_AVAILABLE if is_barred else no_such_tool(name, tools)
            self.step.pending = PromptEdit(at.start, between=self._spelling.refused(at, result), rule=rule)
        elif not self.is_spent and (self.obligations.form is Duty.OWED or (is_barred and not self.step.is_answering)):
            self._open_answer(at.start, rule=rule)
        else:
            self.has_call_as_text = self.step.is_answering = True
            body = self._spelling.call_as_text(at)
            self.step.pending = PromptEdit(at.start, self._spelling.answer, body=body, rule=rule)
