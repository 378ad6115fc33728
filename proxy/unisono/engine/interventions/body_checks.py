"""Checks of message bodies against the requirements of a request. No I/O.

JSON or a code fence that the model wraps around a body is removed.
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

    If `violation` is None, only the JSON syntax is checked, not schemas and grammars.
    """

    def __init__(self, requirements: OutputRequirements, violation: Violation | None) -> None:
        self._requirements = requirements
        self._tools = requirements.tools
        self._violation = violation

    def check(self, message: MessageKind, header: Header, text: str, *, has_form: bool) -> tuple[BodyFault, str]:
        """Return the fault of a message body, and the body to emit.

        `has_form`: the message must have the required answer form. A code fence around such a body is removed if the
        content is valid. If the message calls a tool that takes free text, JSON around that text is removed.
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
        """Return the fault of an answer that must have the form `form`."""
        if form.choices:
            return BodyFault.NONE if text in form.choices else BodyFault.UNLIKE
        if form.grammar is not None:
            is_valid = self._violation is None or self._violation(form.grammar, text) is None
            return BodyFault.NONE if is_valid else BodyFault.UNLIKE
        return self._fault(text, form.schema, objects=form.schema is None)

    def _free_text(self, grammar: TextGrammar | None, text: str) -> tuple[BodyFault, str]:
        def has_fault(content: str) -> bool:
            return grammar is not None and self._violation is not None and self._violation(grammar, content) is not None

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
        # Other calls are checked only if their content type permits JSON. Invalid calls of server tools are not checked
        # here, because the model gets an error result for them.
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
    """Return the free text that a call wraps in a JSON object, or `text` if not wrapped."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    content = value.get("input")
    if content is None and value.keys() == {"patch"}:
        content = value["patch"]
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
