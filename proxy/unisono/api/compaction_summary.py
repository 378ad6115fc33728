"""Compaction: the model writes a summary of a conversation, which replaces the conversation.

If the model writes no complete summary, the conversation stays as it is. A compaction item contains the items that
replace the conversation, encrypted for the tenant of the conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from unisono.api.collected_answer import CollectedAnswer
from unisono.core.conversation import (
    SUMMARY_HEADINGS,
    WHOLE_SUMMARY_HEADING,
    AddedTools,
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    DeveloperMessage,
    Item,
    Phase,
    ToolResult,
    UserMessage,
)
from unisono.core.events import Text
from unisono.core.frozen import dataclass
from unisono.core.generation import FinishReason
from unisono.engine.request import ForbiddenTools, GenerationReport, GenerationRequest, RequestKey
from unisono.errors import StoreTooLarge

# Maximum tokens of a summary and its reasoning.
MAX_SUMMARY_TOKENS = 8_192
# Maximum characters of user messages that are preserved unchanged.
MAX_PRESERVED_CHARACTERS = 64_000

INSTRUCTIONS = (
    "Sum up our conversation up to here. From now on you will see your summary and my newest messages, and nothing "
    "else of what is above. So put in everything you need to go on: what I asked for and the limits I set; what was "
    "done and found out, with names, numbers, paths, identifiers and quotations exactly as they are; what was decided "
    "and why; what failed; what is still open, and the next step. Do not go on with the work, do not call a tool and "
    "do not address me: answer with the summary alone."
)

# Introduction of a client's own instructions for the summary. They are often as short as "Focus on the code", with
# which the model would not write a summary at all.
FURTHER_INSTRUCTIONS = "\n\nFor this summary I have further instructions, which take precedence:\n"

# Types of items that are neither output of the model nor results of its calls.
INPUT = UserMessage | DeveloperMessage | AddedTools

NO_SUMMARY = "compaction: the model wrote no complete summary, so the conversation was not compacted"


class ItemSealing(Protocol):
    """Encryption of items that only this gateway can decrypt."""

    def seal(self, tenant: str, items: Sequence[Item]) -> str: ...

    def open(self, tenant: str, text: str) -> tuple[Item, ...] | None:
        """Return the items; None if the text is damaged, or was not sealed here for this tenant."""
        ...


def summary_request(request: GenerationRequest, further: str = "") -> GenerationRequest:
    """Return the request for a summary of the conversation of `request`.

    A conversation that is already too long is summarized without its oldest items. `further` are the client's
    instructions for the summary.
    """
    instructions = INSTRUCTIONS + (FURTHER_INSTRUCTIONS + further if further else "")
    items = (*request.conversation.items, UserMessage(instructions))
    return replace(
        request,
        conversation=replace(request.conversation, items=items, prefill=None),
        origin=replace(request.origin, key=RequestKey()),
        # Usage is charged once for each seed, so the summary and the answer need different seeds.
        resumption=replace(request.resumption, seed=_summary_seed(request.resumption.seed)),
        # The tools stay in the prompt, which a backend has cached, but no call is run.
        server_tools=None if request.server_tools is None else replace(request.server_tools, decisions=(), max_calls=0),
        answer=replace(
            request.answer,
            max_tokens=MAX_SUMMARY_TOKENS,
            # Requirements on the answer do not apply to the summary.
            choice=None,
            form=None,
            stop=(),
            calls_allowed=False,
            forbidden_tools=ForbiddenTools.KEEP,
        ),
        prompt=replace(request.prompt, truncate=True, for_summary=True),
    )


def _summary_seed(seed: str) -> str:
    return f"{seed} summary" if seed else ""


def summary_of(answer: CollectedAnswer) -> str:
    """Return the summary, or "" if the model wrote only reasoning or calls.

    Also returns "" for a summary that was cut off, because it does not cover the whole conversation that it replaces.
    """
    if answer.finished.reason is FinishReason.LENGTH:
        return ""
    texts = [(closed.item.phase, closed.text) for closed in answer.items if isinstance(closed.item, Text)]
    final = "\n\n".join(text for phase, text in texts if phase is Phase.FINAL).strip()
    return final or "\n\n".join(text for _, text in texts).strip()


def notes_on_summary(summary: str, report: GenerationReport) -> list[str]:
    """Return notes about a missing summary, or about items that the summary does not cover.

    `summary` is the result of `summary_of`, and `report` the report of its generation.
    """
    if not summary:
        return [NO_SUMMARY]
    notes: list[str] = []
    if report.facts.left_out:
        notes.append(
            f"compaction: the summary does not cover the {report.facts.left_out} oldest items, because the "
            "conversation exceeds the context window"
        )
    if count := report.facts.shortened:
        texts, their, they = ("text", "its", "it exceeds") if count == 1 else ("texts", "their", "they exceed")
        notes.append(
            f"compaction: the model read {count} {texts} without {their} middle, because {they} the context window"
        )
    return notes


@dataclass(frozen=True, slots=True)
class Replacement:
    """Items that replace a conversation, in the order `kept`, `newest`, `summary`, `pending`.

    `kept` are the instructions and the added tools, and `newest` the user's newest messages. `pending` contains two
    kinds of calls, each with its reasoning: calls without a result, and calls with a result that the model has not
    answered yet. It also contains these results. Without a summary, `kept` is the whole conversation.
    """

    kept: tuple[Item, ...]
    newest: tuple[UserMessage, ...] = ()
    summary: tuple[UserMessage, ...] = ()
    pending: tuple[Item, ...] = ()

    @property
    def items(self) -> tuple[Item, ...]:
        return (*self.kept, *self.newest, *self.summary, *self.pending)


def replacement_of(items: Sequence[Item], summary: str, room: int = MAX_PRESERVED_CHARACTERS) -> Replacement:
    """Return the items that replace the conversation `items`, including `summary`.

    If `summary` is empty, returns the conversation itself. `room` is the maximum number of preserved characters.
    """
    bare = tuple(without_tokens(item) for item in items)
    if not summary:
        return Replacement(bare)
    end = len(bare) - len(newest_input(bare, room))
    unanswered = [item for item in bare[end:] if not isinstance(item, INPUT)]
    room -= sum(map(_characters, unanswered))
    return _replacement(bare, summary, (*_open_calls(bare[:end]), *unanswered), room)


def _replacement(items: Sequence[Item], summary: str, pending: Iterable[Item], room: int) -> Replacement:
    # Instructions stay as they are, because the model must not rephrase them. Added tools stay too.
    kept = tuple(item for item in items if isinstance(item, DeveloperMessage | AddedTools))
    newest = tuple(newest_messages(items, room))
    return Replacement(kept, newest, (UserMessage(WHOLE_SUMMARY_HEADING + summary),), tuple(pending))


def sealed_items(items: Sequence[Item], seals: ItemSealing, tenant: str) -> str:
    """Return the items encrypted, for a compaction item.

    Raises StoreTooLarge if the items are too large to be decrypted again.
    """
    sealed = seals.seal(tenant, items)
    if seals.open(tenant, sealed) is None:
        raise StoreTooLarge("The compacted conversation is too large for a compaction item; shorten the conversation.")
    return sealed


def compacted_items(items: Sequence[Item], summary: str, room: int = MAX_PRESERVED_CHARACTERS) -> tuple[Item, ...]:
    """Return the items that replace the conversation `items`, including `summary`.

    If `summary` is empty, returns the conversation itself. `room` is the maximum number of preserved characters. They
    are used first for calls and results that the model has not answered, and then for the newest user messages that the
    model has answered.
    """
    bare = tuple(without_tokens(item) for item in items)
    if not summary:
        return bare
    # The model has to answer the newest input, so it follows the summary.
    newest = newest_input(bare, room)
    end = len(bare) - len(newest)
    room -= sum(_characters(item) for item in newest if not isinstance(item, INPUT))
    replacement = _replacement(bare[:end], summary, _open_calls(bare[:end]), room)
    return (*replacement.kept, *replacement.newest, *replacement.summary, *replacement.pending, *bare[end:])


def pending_calls(items: Sequence[Item]) -> list[Item]:
    """Return the calls without a result, each after its reasoning and preamble.

    Parallel calls share their reasoning, which comes once, before the first of them. A call is omitted if the model
    has answered a later message of the user, because the user then gave up the call.
    """
    return _open_calls(items[: _end_of_output(items)])


def _open_calls(items: Iterable[Item]) -> list[Item]:
    """Return the calls without a result, each after its reasoning and preamble.

    The model must have answered everything else in `items`.
    """
    pending: dict[str, Sequence[Item]] = {}
    # Newest reasoning and preambles, which belong to all calls until other reasoning or another preamble.
    introduction: list[Item] = []
    continues = False
    for item in items:
        match item:
            case AssistantReasoning() | AssistantMessage(phase=Phase.COMMENTARY):
                introduction = [*introduction, item] if continues else [item]
            case AssistantCall(call_id=call_id):
                pending[call_id] = (*introduction, item)
            case ToolResult(call_id=call_id):
                pending.pop(call_id, None)
            case AssistantMessage():
                introduction = []
            case UserMessage():
                introduction = []
                pending.clear()
            case _:
                pass
        continues = bool(introduction) and introduction[-1] is item
    return [*{id(item): item for unit in pending.values() for item in unit}.values()]


def newest_input(items: Sequence[Item], room: int = MAX_PRESERVED_CHARACTERS) -> Sequence[Item]:
    """Return the items at the end of the conversation that the model has not answered yet.

    If these items include results of calls, the calls come before the results, with their reasoning and preambles. If
    the calls and results together have more than `room` characters, all of them are left out, because a compaction that
    keeps them would hardly shorten the conversation.
    """
    end = _end_of_output(items)
    start = _start_of_newest_calls(items[:end])
    return items[start if sum(map(_characters, items[start:end])) <= room else end :]


def _start_of_newest_calls(items: Sequence[Item]) -> int:
    """Return the index at which the newest calls begin, with their reasoning and preambles.

    The newest calls are the calls at the end of `items` with a result that the model has not answered. If there are no
    such calls, the index is `len(items)`.
    """
    end = first = len(items)
    while first and isinstance(items[first - 1], AssistantCall | ToolResult):
        first -= 1
    if not any(isinstance(item, ToolResult) for item in items[first:]):
        return end
    start = first
    while start and _introduces_calls(items[start - 1]):
        start -= 1
    if any(isinstance(item, AssistantReasoning) for item in items[start:first]):
        return start
    # Without reasoning, parallel calls look like calls of earlier steps, whose results the model has answered. Only the
    # last call is therefore treated as unanswered.
    last = max((at for at in range(first, end) if isinstance(items[at], AssistantCall)), default=first)
    if last == end - 1:
        return end
    return start if last == first else last


def _characters(item: Item) -> int:
    match item:
        case AssistantCall(arguments=text) | ToolResult(output=text):
            return len(text)
        case AssistantReasoning(text=text) | AssistantMessage(text=text):
            return len(text)
        case _:
            return 0


def _introduces_calls(item: Item) -> bool:
    is_preamble = isinstance(item, AssistantMessage) and item.phase is Phase.COMMENTARY
    return is_preamble or isinstance(item, AssistantReasoning)


def _end_of_output(items: Sequence[Item]) -> int:
    """Return the number of items before the user messages, instructions and tools at the end."""
    end = len(items)
    while end and isinstance(items[end - 1], INPUT):
        end -= 1
    return end


def replaces_history(items: Sequence[Item]) -> bool:
    """Return True if the items of a compaction replace the whole conversation before it.

    Items from `POST /responses/compact` of earlier versions do not, because they lack the newest user messages.
    """
    if any(isinstance(item, UserMessage) and item.text.startswith(WHOLE_SUMMARY_HEADING) for item in items):
        return True
    # The oldest versions used one heading for all summaries, and a compaction without a summary has no heading. In both
    # cases, a compaction replaces everything if it includes user messages, answers, or results of calls that are not
    # pending.
    has_summary = any(_is_summary(item) for item in items)
    end = len(items) - len(newest_input(items)) if has_summary else len(items)
    return any(_is_history(item) and (at < end or isinstance(item, UserMessage)) for at, item in enumerate(items))


def _is_summary(item: Item) -> bool:
    return isinstance(item, UserMessage) and item.text.startswith(SUMMARY_HEADINGS)


def _is_history(item: Item) -> bool:
    match item:
        case UserMessage():
            return not _is_summary(item)
        case AssistantMessage(phase=phase):
            # Commentary also introduces pending calls.
            return phase is Phase.FINAL
        case _:
            return isinstance(item, ToolResult)


def newest_messages(items: Sequence[Item], room: int = MAX_PRESERVED_CHARACTERS) -> list[UserMessage]:
    """Return the user's newest messages, oldest first, with at most `room` characters in total."""
    preserved: list[UserMessage] = []
    for message in reversed(items):
        if not isinstance(message, UserMessage) or _is_summary(message):
            continue
        room -= len(message.text)
        if room < 0:
            break
        preserved.append(message)
    return preserved[::-1]


def without_tokens(item: Item) -> Item:
    """Return an item without its token ids, which are twice as long as the text."""
    match item:
        case AssistantReasoning() | AssistantMessage() | AssistantCall():
            return replace(item, tokens=())
        case _:
            return item
