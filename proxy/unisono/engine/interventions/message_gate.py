"""Gate of the router: accepts messages, or stops the router for an intervention. No I/O."""

from __future__ import annotations

from unisono.core.ports import Violation
from unisono.core.recovery_rules import REGENERATED_ANSWER, REGENERATED_CALL
from unisono.engine.interventions.body_checks import BodyChecks
from unisono.engine.interventions.controller import InterventionController
from unisono.engine.interventions.policy import (
    CALLS,
    CLOSING,
    MAX_REGENERATIONS,
    OPENING,
    REFUSED,
    BodyAction,
    BodyFault,
    HeaderAction,
    MessageKind,
)
from unisono.engine.interventions.requirements import Duty
from unisono.harmony.header import COMMENTARY, Header
from unisono.harmony.message_parts import OpenPart


class MessageGate:
    """Gate of one answer (`harmony.gate.Gate`).

    The gate reads the state of the controller, and records accepted messages in that state.
    """

    # Rules. The tables `OPENING` and `CLOSING` give the action for each message.
    # - The message whose header an intervention inserted is accepted.
    # - After MAX_EDITS edits of a step everything is accepted, except calls that are never emitted.
    # - A message that was partly emitted cannot be stopped at its end.

    def __init__(self, controller: InterventionController, violation: Violation | None) -> None:
        self._controller = controller
        self._obligations = controller.obligations
        self._requirements = controller.requirements
        self._has_form = controller.requirements.form is not None
        self._checks = BodyChecks(controller.requirements, violation)

    @property
    def unfit(self) -> bool:
        return self._obligations.form is Duty.MISSED

    def opens(self, message: OpenPart) -> bool:
        if self._requirements.accepts_texts and not message.header.is_call:
            return True
        step, kind = self._controller.step, self._obligations.message_kind(message.header)
        if kind not in (MessageKind.LATE_THOUGHT, MessageKind.THOUGHT):
            step.has_skipped = False
        act = OPENING[self._obligations.next, kind]
        if act is HeaderAction.PASS:
            return True
        # If the model reasons again although an answer was opened, its reasoning is accepted: another edit would lead
        # to the same result.
        is_inserted = message.end == step.header_end
        if is_inserted or self._controller.is_spent or (act is HeaderAction.SKIP and step.is_answering):
            return True
        return act is HeaderAction.GUIDE and not self._controller.can_guide(message.header)

    def is_buffered(self, header: Header) -> bool:
        if not (header.is_call or self._has_form):
            return False
        message = self._obligations.message_kind(header)
        if message in REFUSED or header.recipient.full_name in self._requirements.tools.buffered:
            return True
        # Even under an enforced constraint, a body may be incomplete: a control token inside a string ends the message.
        is_free = self._controller.constraint is None or self._requirements.whole
        return is_free and self._obligations.has_form(message)

    def limits_blanks(self, header: Header) -> bool:
        if not (header.is_call or self._has_form):
            return False
        message, form = self._obligations.message_kind(header), self._requirements.form
        is_json_answer = form is not None and form.is_json and self._obligations.has_form(message)
        is_json = is_json_answer or self._checks.is_json_call(message, header)
        return is_json and not self._controller.is_spent and self._requirements.detects_repetition

    def closes(self, header: Header, text: str, *, held: bool) -> str | None:
        if self._requirements.accepts_texts and not header.is_call:
            is_preamble = header.channel == COMMENTARY and bool(self._requirements.tools.offered)
            self._controller.step.record_message(is_preamble=is_preamble, is_call=False)
            return text
        message = self._obligations.message_kind(header)
        has_form = self._obligations.has_form(message)
        fault, content = self._checks.check(message, header, text, has_form=has_form)
        action = CLOSING[message, fault]
        if held and self._is_rejected(action, message, header, text):
            return None
        self._record_message(message, fault)
        return content

    def _is_rejected(self, action: BodyAction, message: MessageKind, header: Header, text: str) -> bool:
        match action:
            case BodyAction.EMIT:
                return False
            case BodyAction.REFUSE:
                return True
            case BodyAction.REGENERATE if self._controller.is_spent:
                return False
            case BodyAction.REGENERATE:
                rule = REGENERATED_ANSWER if message is MessageKind.ANSWER else REGENERATED_CALL
                step = self._controller.step
                if rule in self._requirements.disabled_rules or step.last.body:
                    return False
                # After the last attempt, the first attempt is restored and accepted in spite of its fault.
                return step.attempts.count < MAX_REGENERATIONS or not step.attempts.is_first(header, text)

    def _record_message(self, message: MessageKind, fault: BodyFault) -> None:
        is_preamble = message is MessageKind.PREAMBLE
        self._controller.step.record_message(is_preamble=is_preamble, is_call=message in CALLS)
        self._obligations.record_message(message, is_faulty=CLOSING[message, fault] is BodyAction.REGENERATE)
