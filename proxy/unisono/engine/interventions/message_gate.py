"""Gate of the router: accepts messages or stops where an intervention is due.

A complete body is checked against the requirements of the request. No I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Final

from unisono.core.conversation import AnswerForm, TextGrammar
from unisono.core.generation import FIRST_SPECIAL
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
from unisono.engine.interventions.requirements import Duty, Obligations, OutputRequirements
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import COMMENTARY, Header
from unisono.harmony.message_parts import OpenPart
from unisono.harmony.raw_codec import MAX_CHARACTER_TOKENS, unfinished
from unisono.harmony.recipients import RecipientKind
from unisono.harmony.router import HarmonyRouter

# Limits on the tokens of one answer: reasoning budget and endless repetition. No I/O.
#
# A model that repeats the same tokens never stops by itself. Only a long, exact repetition without a gap counts:
# tables of equal rows, lists of zeros and padded data are valid answers. For reasoning, which is not read as data, a
# shorter one is enough. The check is cheap. It runs every `CHECK_INTERVAL_TOKENS` tokens, usually ends at the first
# few tokens, and never reads them all more than once.

CHECK_INTERVAL_TOKENS: Final = 256  # tokens between two checks
MAX_PERIOD_TOKENS: Final = 64  # longest period in tokens
REPEAT_TOKENS: Final = 4096  # tokens that must repeat those one period earlier: at least 65 occurrences
REASONING_REPEAT_TOKENS: Final = 512
_UNLIMITED: Final = 1 << 62


class ReadingLimits:
    """Positions between two tokens at which reading stops, so that the controller can decide.

    `read` is the number of journal entries since the last note or step.
    """

    # Rules.
    # - Reasoning ends before the first token that the budget has no room for, but not inside a character.
    # - A marker ends reasoning by itself: a budget equal to its length is not exceeded.
    # - Repetition is checked at fixed positions of the journal, so that a replay stops at the same token.

    def __init__(
        self, encoding: Encoding, router: HarmonyRouter, requirements: OutputRequirements, obligations: Obligations
    ) -> None:
        self._encoding = encoding
        self._router = router
        self._obligations = obligations
        self.budget = requirements.budget  # limit of reasoning tokens
        self._detects_repetition = requirements.detects_repetition
        if self.budget is not None and self.budget < 1:
            obligations.is_late = True

    def until_check(self, read: int) -> int:
        """Return the number of tokens before the next check for repetition."""
        return CHECK_INTERVAL_TOKENS - read % CHECK_INTERVAL_TOKENS if self._detects_repetition else _UNLIMITED

    def are_in_budget(self, tokens: Sequence[int]) -> bool:
        """Return whether the budget has room for all `tokens`, and none of them is a marker."""
        assert self.budget is not None
        if self._obligations.is_late:
            return True
        room = self.budget - self._router.counter.reasoning
        return len(tokens) <= room and max(tokens, default=0) < FIRST_SPECIAL

    def portion(self, tokens: Sequence[int], read: int) -> int:
        """Return the number of `tokens` that may be read before the next check."""
        size = min(len(tokens), self.until_check(read))
        if self.budget is not None and not self._obligations.is_late:
            # The router may hold back part of a header. A marker may show that these tokens were reasoning, and more
            # reasoning may follow.
            size = next((at for at, token in enumerate(tokens[:size], 1) if token >= FIRST_SPECIAL), size)
            if self._router.is_reasoning is not False:
                size = min(size, max(self.budget - self._router.counter.reasoning, 1))
        return size

    def has_room_for(self, token: int, tokens_read: Callable[[], Sequence[int]]) -> bool:
        """Return whether `token` fits into the reasoning budget, or no budget applies.

        `tokens_read` returns the tokens since the last note or step.
        """
        if self.budget is None or self._obligations.is_late:
            return True
        used, is_reasoning = self._router.counter.reasoning, self._router.is_reasoning
        if used < self.budget:
            return True
        # The rest of a character that bytes were read of may exceed the budget. Bytes that never make a character must
        # not: hence the limit.
        is_cut = used < self.budget + MAX_CHARACTER_TOKENS and unfinished(self._encoding, tokens_read())
        return bool(is_cut or (is_reasoning and token >= FIRST_SPECIAL))

    def is_repeating(self, journal: Sequence[int], read: int) -> bool:
        """Return whether the end of `journal` is a repetition; call it after each portion."""
        if not self._detects_repetition or read % CHECK_INTERVAL_TOKENS:
            return False
        length = REASONING_REPEAT_TOKENS if self._router.is_reasoning else REPEAT_TOKENS
        return repeats(journal, len(journal) - read, length)


def repeats(tokens: Sequence[int], begin: int, length: int = REPEAT_TOKENS) -> bool:
    """Return whether the generation from `begin` ends in a repetition of `length` tokens.

    `length` must be a multiple of the longest period.
    """
    size = len(tokens)
    if size - begin <= length:
        return False
    last = tokens[-1]
    before = tokens[-1 - MAX_PERIOD_TOKENS : -1]
    # Usually the last token does not occur among the tokens just before it.
    if last not in before:
        return False
    few = tokens[-MAX_PERIOD_TOKENS:]
    for period in range(1, MAX_PERIOD_TOKENS + 1):
        if before[-period] == last and tokens[size - MAX_PERIOD_TOKENS - period : size - period] == few:
            # If a longer period held over the whole length, the shortest one that holds for these few tokens would hold
            # too.
            return size - begin >= length + period and tokens[-length:] == tokens[-length - period : -period]
    return False


class MessageGate:
    """Gate of one answer (`harmony.gate.Gate`).

    It reads the state of the controller and records accepted messages in it.
    """

    # Rules. The tables `OPENING` and `CLOSING` give the action for each message.
    # - The message whose header an intervention inserted is accepted.
    # - After MAX_EDITS edits of a step everything is accepted, except calls that are never emitted.
    # - A message of which something was emitted cannot be stopped at its end.

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
        # Reasoning after an opened answer header is the model's decision: another attempt would lead to it again.
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
        # A backend that enforces a form may still break it off: a marker inside a string ends the message.
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
                # After the last attempt, the first one is restored, and accepted although it has the same fault.
                return step.attempts.count < MAX_REGENERATIONS or not step.attempts.is_first(header, text)

    def _record_message(self, message: MessageKind, fault: BodyFault) -> None:
        is_preamble = message is MessageKind.PREAMBLE
        self._controller.step.record_message(is_preamble=is_preamble, is_call=message in CALLS)
        self._obligations.record_message(message, is_faulty=CLOSING[message, fault] is BodyAction.REGENERATE)


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


_SURROGATE = re.compile("[\ud800-\udfff]")
FENCE: Final = "```"
_LANGUAGE = re.compile(r"[A-Za-z0-9_-]*")


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
