"""Checks of complete JSON bodies: answers of a required form, and call arguments. No I/O."""

from __future__ import annotations

from typing import Final

from unisono.engine.code_fence import without_code_fence
from unisono.engine.policy import BodyFault, MessageKind, fault_of
from unisono.engine.wishes import OutputRequirements, Schema, Violation, recipient_of
from unisono.harmony.header import Header
from unisono.harmony.recipients import RecipientKind

CODE_FENCE: Final = "code-fence"


class BodyChecks:
    """Checks of message bodies against the requirements.

    Without `violation`, schemas are not checked.
    """

    def __init__(self, wishes: OutputRequirements, violation: Violation | None) -> None:
        self._wishes = wishes
        self._violation = violation

    def judged(self, message: MessageKind, header: Header, text: str, *, has_form: bool) -> tuple[BodyFault, str]:
        """Return the fault of a body, and its text, without a code fence where that makes it valid."""
        form = self._wishes.form
        if form is not None and has_form:
            fault = self._fault(text, form.schema, objects=form.schema is None)
            if fault is BodyFault.NONE or CODE_FENCE in self._wishes.unmended:
                return fault, text
            content = without_code_fence(text)
            if content is not None and self._fault(content, form.schema, objects=form.schema is None) is BodyFault.NONE:
                return BodyFault.NONE, content
            return fault, text
        if not self.is_json_call(message, header):
            return BodyFault.NONE, text
        schema = None if message is MessageKind.CALL else self._wishes.schemas.get(recipient_of(header))
        return self._fault(text or "{}", schema, objects=True), text

    def is_json_call(self, message: MessageKind, header: Header) -> bool:
        """Return whether a message is a call whose arguments are checked here."""
        wishes, recipient = self._wishes, recipient_of(header)
        if message not in (MessageKind.WANTED, MessageKind.STRICT, MessageKind.CALL) or recipient in wishes.texts:
            return False
        if header.recipient.kind is not RecipientKind.FUNCTION and recipient not in wishes.schemas:
            return False
        # For other calls the content type decides. The model reads error results about invalid calls of server tools.
        is_certain = message is not MessageKind.CALL
        is_own = not wishes.told or recipient in wishes.own
        return is_certain or (header.content_type in (None, "json") and is_own)

    def _fault(self, text: str, schema: Schema | None, *, objects: bool) -> BodyFault:
        if (
            (fault := fault_of(text, objects=objects)) is not BodyFault.NONE
            or schema is None
            or self._violation is None
        ):
            return fault
        return fault if self._violation(schema, text) is None else BodyFault.UNLIKE
