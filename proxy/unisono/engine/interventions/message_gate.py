"""Gate of the router: accepts messages or stops where an intervention is due. No I/O."""

from __future__ import annotations

from unisono.core.ports import Violation
from unisono.engine.interventions.controller import (
    REGENERATED_ANSWER,
    REGENERATED_CALL,
    REPETITION,
    InterventionController,
)
from unisono.engine.interventions.policy import (
    CLOSING,
    MAX_REGENERATIONS,
    OPENING,
    BodyAction,
    BodyFault,
    HeaderAction,
    MessageKind,
)
from unisono.engine.interventions.prompt_edit import NONE_REJECTED
from unisono.engine.interventions.requirements import CALLS, BodyChecks
from unisono.harmony.header import Header
from unisono.harmony.message_parts import OpenPart


class MessageGate:
    """Gate of one answer (`harmony.gate.Gate`).

    It reads the state of the controller and records accepted messages in it.
    """

    # Rules. The tables `OPENING` and `CLOSING` give the action for each message.
    # - The message whose header an intervention inserted is accepted.
    # - After MAX_EDITS edits of a step everything is accepted.
    # - A message of which something was emitted cannot be stopped at its end.

    def __init__(self, controller: InterventionController, violation: Violation | None) -> None:
        self._controller = controller
        self._obligations = controller.obligations
        self._requirements = controller.requirements
        self._checks = BodyChecks(controller.requirements, violation)

    @property
    def unfit(self) -> bool:
        return self._obligations.is_unfit

    def opens(self, message: OpenPart) -> bool:
        step, kind = self._controller.step, self._obligations.message_kind(message.header)
        if kind not in (MessageKind.LATE_THOUGHT, MessageKind.THOUGHT):
            step.has_skipped = False
        act = OPENING[self._obligations.next, kind]
        # Reasoning after an opened answer header is the model's decision: another attempt would lead to it again.
        is_inserted = message.end == step.header_end
        if is_inserted or self._controller.is_spent or (act is HeaderAction.SKIP and step.is_answering):
            return True
        if kind is MessageKind.BARRED and not self._requirements.hold_calls:
            return False
        return act is HeaderAction.PASS or (
            act is HeaderAction.GUIDE and not self._controller.can_guide(message.header)
        )

    def is_buffered(self, header: Header) -> bool:
        # A backend that enforces a form may still break it off: a marker inside a string ends the message.
        is_free = self._controller.constraint is None or self._requirements.whole
        return is_free and self._obligations.has_form(self._obligations.message_kind(header))

    def limits_blanks(self, header: Header) -> bool:
        message = self._obligations.message_kind(header)
        is_json = self._obligations.has_form(message) or self._checks.is_json_call(message, header)
        return is_json and not self._controller.is_spent and REPETITION not in self._requirements.unmended

    def closes(self, header: Header, text: str, *, held: bool) -> str | None:
        message = self._obligations.message_kind(header)
        has_form = self._obligations.has_form(message)
        fault, content = self._checks.judged(message, header, text, has_form=has_form)
        action = CLOSING[message, fault]
        if held and not self._controller.is_spent and self._is_rejected(action, message, header, text):
            return None
        self._record_message(message, fault)
        return content

    def _is_rejected(self, action: BodyAction, message: MessageKind, header: Header, text: str) -> bool:
        match action:
            case BodyAction.EMIT:
                return False
            case BodyAction.REFUSE:
                return True
            case BodyAction.REGENERATE:
                rule = REGENERATED_ANSWER if message is MessageKind.ANSWER else REGENERATED_CALL
                step = self._controller.step
                if rule in self._requirements.unmended or step.last.body:
                    return False
                return step.attempts.count < MAX_REGENERATIONS or not step.attempts.is_first(header, text)

    def _record_message(self, message: MessageKind, fault: BodyFault) -> None:
        step = self._controller.step
        step.trims = 0
        if message is not MessageKind.PREAMBLE:
            step.attempts = NONE_REJECTED
        step.has_call = step.has_call or message in CALLS
        self._obligations.record_message(message, is_faulty=CLOSING[message, fault] is BodyAction.REGENERATE)
