"""Checks of message bodies against the requirements of a request. No I/O.

JSON or a code fence that the model writes around a body is removed.
"""

from __future__ import annotations

import json
import re
from typing import Final

from unisono.core.conversation import AnswerForm, TextGrammar
from unisono.core.ports import Schema, Violation
from unisono.core.recovery_rules import CODE_FENCE
from unisono.engine.interventions.policy import CALLS, BodyFault, MessageKind, fault_of
from unisono.engine.interventions.requirements import OutputRequirements
from unisono.harmony.header import Header
from unisono.harmony.recipients import RecipientKind

_SURROGATE = re.compile("[\ud800-\udfff]")
FENCE: Final = "```"
_LANGUAGE = re.compile(r"[A-Za-z0-9_-]*")


class BodyChecks:
    """Checks of message bodies against the requirements.

    Without `violation`, schemas are not checked.
    """

    def __init__(self, requirements: OutputRequirements, violation: Violation | None) -> None:
        self._requirements = requirements
        self._tools = requirements.tools
        self._violation = violation

    def check(self, message: MessageKind, header: Header, text: str, *, has_form: bool) -> tuple[BodyFault, str]:
        """Return the fault of a body, and its text.

        A code fence is removed if the text is valid without it, and JSON around the text of a tool that takes no JSON.
        """
        form = self._requirements.form
        if form is not None and has_form:
            fault = self._form_fault(form, text)
            if fault is BodyFault.NONE or CODE_FENCE in self._requirements.disabled_rules:
                return fault, text
            content = without_code_fence(text)
            if content is not None and self._form_fault(form, content) is BodyFault.NONE:
                return BodyFault.NONE, content
            return fault, text
        if message not in CALLS:
            return BodyFault.NONE, text
        if header.recipient.full_name in self._tools.texts:
            return self._free_text(self._tools.texts[header.recipient.full_name], text)
        if not self.is_json_call(message, header):
            return BodyFault.NONE, text
        schema = None if message is MessageKind.CALL else self._tools.schemas.get(header.recipient.full_name)
        return self._fault(text or "{}", schema, objects=True), text

    def _form_fault(self, form: AnswerForm, text: str) -> BodyFault:
        """Return the fault of an answer that has to have a form."""
        if form.choices:
            return BodyFault.NONE if text in form.choices else BodyFault.UNLIKE
        if form.grammar is not None:
            is_valid = self._violation is None or self._violation(form.grammar, text) is None
            return BodyFault.NONE if is_valid else BodyFault.UNLIKE
        return self._fault(text, form.schema, objects=form.schema is None)

    def _free_text(self, grammar: TextGrammar | None, text: str) -> tuple[BodyFault, str]:
        def has_fault(content: str) -> bool:
            return grammar is not None and self._violation is not None and self._violation(grammar, content) is not None

        # The grammar of Codex's `exec` allows any text, also the JSON that the model writes around it.
        content = without_json(text)
        if content != text and has_fault(content) and not has_fault(text):
            content = text
        return BodyFault.UNLIKE if has_fault(content) else BodyFault.NONE, content

    def is_json_call(self, message: MessageKind, header: Header) -> bool:
        """Return whether a message is a call whose arguments are checked here."""
        tools, recipient = self._tools, header.recipient.full_name
        if message not in CALLS or recipient in tools.texts:
            return False
        if header.recipient.kind is not RecipientKind.FUNCTION and recipient not in tools.schemas:
            return False
        # For other calls the content type decides. The model reads error results about invalid calls of server tools.
        is_certain = message is not MessageKind.CALL
        is_own = tools.servers is None or recipient in tools.own
        return is_certain or (header.content_type in (None, "json") and is_own)

    def _fault(self, text: str, schema: Schema | None, *, objects: bool) -> BodyFault:
        if (
            (fault := fault_of(text, objects=objects)) is not BodyFault.NONE
            or schema is None
            or self._violation is None
        ):
            return fault
        return fault if self._violation(schema, text) is None else BodyFault.UNLIKE


def without_json(text: str) -> str:
    """Return the free text that a call wraps in an object; any other text unchanged."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    content = value.get("input")
    if content is None and value.keys() == {"patch"}:
        content = value["patch"]
    # Half of a surrogate pair is no character.
    return content if isinstance(content, str) and not _SURROGATE.search(content) else text


def without_code_fence(text: str) -> str | None:
    """Return the content of the code block that `text` consists of; None if it is anything else."""
    # No regular expression reads the text: it is long, and the model and the prompt choose its content.
    block = text.strip()
    if not block.startswith(FENCE):
        return None
    opening, _, rest = block.removeprefix(FENCE).partition("\n")
    if not rest.endswith(FENCE) or _LANGUAGE.fullmatch(opening.removesuffix("\r").rstrip(" \t")) is None:
        return None
    return rest.removesuffix(FENCE).rstrip(" \t").removesuffix("\n").removesuffix("\r")
