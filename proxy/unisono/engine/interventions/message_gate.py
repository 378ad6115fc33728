"""Gate of the router: accepts messages, or stops the router for an intervention. No I/O."""

from __future__ import annotations

import json
import re
from typing import Final

from unisono.core.conversation import AnswerForm, TextGrammar
from unisono.core.ports import Schema, Violation
from unisono.core.recovery_rules import CODE_FENCE, REGENERATED_ANSWER, REGENERATED_CALL
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
    fault_of,
)
from unisono.engine.interventions.requirements import Duty, OutputRequirements
from unisono.harmony.gate_protocol import OpenPart
from unisono.harmony.header import COMMENTARY, Header
from unisono.harmony.recipients import RecipientKind

_SURROGATE = re.compile("[\ud800-\udfff]")
FENCE: Final = "```"
# Arguments of a call whose body is blank.
NO_ARGUMENTS: Final = "{}"
MAX_RESULTS: Final = 4  # number of check results that are remembered
_LANGUAGE = re.compile(r"[A-Za-z0-9_-]*")


def has_checks(requirements: OutputRequirements) -> bool:
    """Return whether some messages must match a schema or grammar.

    The time for such a check depends on the schema, and can be long even for a short message.
    """
    tools, form = requirements.tools, requirements.form
    if form is not None and (form.schema is not None or form.grammar is not None):
        return True
    has_schema = not tools.schemas.keys().isdisjoint((*tools.strict, *(tools.forced or ())))
    return has_schema or any(grammar is not None for grammar in tools.texts.values())


class BodyChecks:
    """Checks of message bodies against the requirements.

    If `violation` is None, only the JSON syntax is checked, not schemas and grammars.
    """

    def __init__(self, requirements: OutputRequirements, violation: Violation | None) -> None:
        self._requirements = requirements
        self._tools = requirements.tools
        self._violation = violation
        # Results of recent checks, by the id of the schema and the text. A regenerated message often has the same text.
        self._is_valid: dict[tuple[int, str], bool] = {}

    def check(
        self, message: MessageKind, header: Header, text: str, *, has_form: bool, held: bool = True
    ) -> tuple[BodyFault, str]:
        """Return the fault of a message body, and the body to emit.

        `has_form`: the message must have the required answer form. A code fence around such a body is removed if the
        content is valid and the body was not emitted yet (`held`). If the message calls a tool that takes free text,
        JSON around that text is removed. A blank body of any other call to a function becomes an empty object.
        """
        form = self._requirements.form
        if form is not None and has_form:
            fault = self._form_fault(form, text)
            if fault is BodyFault.NONE or not held or CODE_FENCE in self._requirements.disabled_rules:
                return fault, text
            content = without_code_fence(text)
            if content is not None and self._form_fault(form, content) is BodyFault.NONE:
                return BodyFault.NONE, content
            return fault, text
        if message not in CALLS:
            return BodyFault.NONE, text
        if header.recipient.full_name in self._tools.texts:
            return self._free_text(self._tools.texts[header.recipient.full_name], text)
        if not text.strip() and header.recipient.kind is RecipientKind.FUNCTION:
            # Clients parse the arguments, so they must be JSON. Blanks that were emitted cannot be removed.
            text = NO_ARGUMENTS if held else text + NO_ARGUMENTS
        if not self.is_json_call(message, header):
            return BodyFault.NONE, text
        schema = None if message is MessageKind.CALL else self._tools.schemas.get(header.recipient.full_name)
        return self._fault(text, schema, objects=True), text

    def _form_fault(self, form: AnswerForm, text: str) -> BodyFault:
        """Return the fault of an answer that must have the form `form`."""
        if form.choices:
            return BodyFault.NONE if text in form.choices else BodyFault.UNLIKE
        if form.grammar is not None:
            return BodyFault.NONE if self._fits(form.grammar, text) else BodyFault.UNLIKE
        return self._fault(text, form.schema, objects=form.schema is None)

    def _free_text(self, grammar: TextGrammar | None, text: str) -> tuple[BodyFault, str]:
        def has_fault(content: str) -> bool:
            return grammar is not None and not self._fits(grammar, content)

        # The unwrapped text is tried first: the grammar of Codex's `exec` allows any text, even JSON around the text.
        content = without_json(text)
        if content != text and has_fault(content) and not has_fault(text):
            content = text
        return BodyFault.UNLIKE if has_fault(content) else BodyFault.NONE, content

    def is_json_call(self, message: MessageKind, header: Header) -> bool:
        """Return whether a message is a call whose arguments are checked as JSON."""
        tools, recipient = self._tools, header.recipient.full_name
        if message not in CALLS or recipient in tools.texts:
            return False
        if header.recipient.kind is not RecipientKind.FUNCTION and recipient not in tools.schemas:
            return False
        # Invalid calls to server tools are not checked here, because the model gets an error result for them. Clients
        # receive arguments without their content type, and always parse them as JSON.
        return message is not MessageKind.CALL or tools.servers is None or recipient in tools.own

    def _fault(self, text: str, schema: Schema | None, *, objects: bool) -> BodyFault:
        fault = fault_of(text, objects=objects)
        if fault is not BodyFault.NONE or schema is None:
            return fault
        return fault if self._fits(schema, text) else BodyFault.UNLIKE

    def _fits(self, schema: Schema | TextGrammar, text: str) -> bool:
        if self._violation is None:
            return True
        # The requirements keep the schema alive, so no other object can have the same id.
        key = id(schema), text
        if key not in self._is_valid:
            if len(self._is_valid) == MAX_RESULTS:
                self._is_valid.clear()
            self._is_valid[key] = self._violation(schema, text) is None
        return self._is_valid[key]


def without_json(text: str) -> str:
    """Return the free text that a call wraps in a JSON object, or `text` if it is not wrapped."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    # An object with any other member is not a wrapper: the object itself is the text for the tool.
    if value.keys() not in ({"input"}, {"patch"}):
        return text
    (content,) = value.values()
    # A text with half of a surrogate pair is left wrapped, because half a pair is not a character.
    return content if isinstance(content, str) and not _SURROGATE.search(content) else text


def without_code_fence(text: str) -> str | None:
    """Return the content if `text` consists of a single code block, else None."""
    # No regular expression is applied to the whole text: on a long text that the model or a client chose, the search
    # could take very long.
    block = text.strip()
    if not block.startswith(FENCE):
        return None
    opening, _, rest = block.removeprefix(FENCE).partition("\n")
    if not rest.endswith(FENCE) or _LANGUAGE.fullmatch(opening.removesuffix("\r").rstrip(" \t")) is None:
        return None
    return rest.removesuffix(FENCE).rstrip(" \t").removesuffix("\n").removesuffix("\r")


class MessageGate:
    """Gate of one answer (`harmony.gate_protocol.Gate`).

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
        self._is_inserted = False  # an intervention inserted the header of the message that opened last

    @property
    def unfit(self) -> bool:
        return self._obligations.form is Duty.MISSED

    def opens(self, message: OpenPart) -> bool:
        if self._requirements.accepts_texts and not message.header.is_call:
            return True
        step, kind = self._controller.step, self._obligations.message_kind(message.header)
        self._is_inserted = message.end == step.header_end
        if kind not in (MessageKind.LATE_THOUGHT, MessageKind.THOUGHT):
            step.has_skipped = False
        act = OPENING[self._obligations.next, kind]
        if act is HeaderAction.PASS:
            return True
        # If the model reasons again although an answer was opened, its reasoning is accepted: another edit would lead
        # to the same result.
        if self._is_inserted or self._controller.is_spent or (act is HeaderAction.SKIP and step.is_answering):
            return True
        return act is HeaderAction.GUIDE and not self._controller.can_guide(message.header)

    def is_aside(self, header: Header) -> bool:
        form = self._requirements.form
        if form is None or header.is_call:
            return False
        # Only one message has the required form. Clients would parse any other visible text as a part of this message.
        if self._obligations.message_kind(header) is MessageKind.PREAMBLE:
            return not form.keeps_preambles
        return self._obligations.form is not Duty.OWED

    def is_buffered(self, header: Header) -> bool:
        if not (header.is_call or self._has_form):
            return False
        message = self._obligations.message_kind(header)
        if message in REFUSED or header.recipient.full_name in self._requirements.tools.buffered:
            return True
        # The backend enforces a constraint only in the message that the intervention opened. Even then, a body may be
        # incomplete: a control token inside a string ends the message.
        is_constrained = self._is_inserted and self._controller.constraint is not None
        is_free = not is_constrained or self._requirements.hold_form
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
        fault, content = self._checks.check(message, header, text, has_form=has_form, held=held)
        action = CLOSING[message, fault]
        if held and self._is_rejected(action, message, header, text):
            return None
        if message is MessageKind.PREAMBLE and self._obligations.form is Duty.OWED:
            form_fault, _ = self._checks.check(message, header, text, has_form=True)
            self._obligations.record_preamble(text, is_valid=form_fault is BodyFault.NONE)
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
                is_restored = bool(step.last.body) and step.last.attempts.count == MAX_REGENERATIONS
                if rule in self._requirements.disabled_rules or is_restored:
                    return False
                # After the last attempt, the first attempt is restored and accepted in spite of its fault.
                return step.attempts.count < MAX_REGENERATIONS or not step.attempts.is_first(header, text)

    def _record_message(self, message: MessageKind, fault: BodyFault) -> None:
        is_preamble = message is MessageKind.PREAMBLE
        self._controller.step.record_message(is_preamble=is_preamble, is_call=message in CALLS)
        self._obligations.record_message(message, is_faulty=CLOSING[message, fault] is BodyAction.REGENERATE)
