"""Shortening of a conversation that is too long for a context window.

The oldest items are dropped, as few as necessary. A call is dropped together with its result, and reasoning together
with the message or call that follows it. The newest message of the user, which states the task, and the newest summary
of a compaction remain. A request for a summary never fails because of a long item: if the newest items alone are too
long, their texts lose their middle.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from unisono.core.conversation import (
    SUMMARY_HEADINGS,
    AddedTools,
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    Conversation,
    DeveloperMessage,
    Item,
    Phase,
    ToolResult,
    UserMessage,
)
from unisono.core.frozen import dataclass
from unisono.engine.prompt import RenderedPrompt, render, render_here
from unisono.engine.request import GenerationRequest
from unisono.harmony.encoding import Encoding
from unisono.harmony.render import Renderer
from unisono.harmony.tool_declarations import ToolSet

# Number of tokens that are reserved for an answer without a token limit when oldest items may be dropped.
MIN_ANSWER_TOKENS: Final = 1_024

SHORTENED: Final = "\n\n[The middle of this text is left out, because the text is too long for the context window.]\n\n"
# Maximum number of tokens of `SHORTENED`, plus a margin: the rest of a text may have more tokens when it is tokenized
# again.
SHORTENED_TOKENS: Final = 48

# Name of the field with the text of an item, if it is not `text`.
_TEXT_FIELDS: Final[dict[type, str]] = {AssistantCall: "arguments", ToolResult: "output"}


@dataclass(frozen=True, slots=True)
class TruncatedConversation:
    """A conversation that was shortened to fit a context window, and its rendered prompt.

    `left_out` is the number of oldest items that were dropped. `shortened` is the number of texts whose middle was
    removed.
    """

    conversation: Conversation
    rendered: RenderedPrompt
    left_out: int = 0
    shortened: int = 0


async def truncate(
    renderer: Renderer,
    conversation: Conversation,
    tools: ToolSet,
    limit: int,
    salt: str = "",
    *,
    for_summary: bool = False,
) -> TruncatedConversation:
    """Drop as few of the oldest items as necessary for a prompt of at most `limit` tokens.

    If the items that must remain exceed the limit, the prompt exceeds it too. If `for_summary` is True, the last item
    asks for a summary of the other items, and long texts of the other items are shortened in this case. Prompts with
    different `salt` share no block hashes.
    """
    rendered = await render(renderer, conversation, tools, salt)
    if len(rendered.prompt.tokens) <= limit:
        return TruncatedConversation(conversation, rendered)
    return await asyncio.to_thread(_truncated, renderer, conversation, tools, limit, salt, for_summary)


async def truncate_for(
    request: GenerationRequest,
    renderer: Renderer,
    conversation: Conversation,
    tools: ToolSet,
    window: int,
    salt: str,
) -> TruncatedConversation:
    """Truncate the conversation of `request` so that prompt and answer fit into `window` tokens."""
    # Reserve at most a quarter of the window for the answer, so that a small window still holds some conversation.
    wanted = min(request.answer.max_tokens or MIN_ANSWER_TOKENS, window // 4)
    for_summary = request.prompt.for_summary
    return await truncate(renderer, conversation, tools, window - wanted, salt, for_summary=for_summary)


def _truncated(
    renderer: Renderer, conversation: Conversation, tools: ToolSet, limit: int, salt: str, for_summary: bool
) -> TruncatedConversation:
    items = conversation.items
    others = items[:-1] if for_summary else items
    starts, always = unit_starts(others), _always_kept(others)

    def without(units: int) -> Conversation:
        first = starts[units - 1] if units else 0
        return replace(conversation, items=(*(items[at] for at in always if at < first), *items[first:]))

    def fits(units: int) -> bool:
        return len(renderer.prompt(without(units), tools)) <= limit

    # A prompt never grows when another unit is dropped, so a binary search works. The newest unit always remains.
    dropped = bisect_left(range(len(starts)), True, lo=min(1, len(starts)), key=fits)
    shorter, shortened = without(dropped), 0
    left_out = len(items) - len(shorter.items)
    if for_summary and not fits(dropped):
        shorter, shortened = _shortened(renderer, shorter, tools, limit)
    return TruncatedConversation(shorter, render_here(renderer, shorter, tools, salt), left_out, shortened)


def unit_starts(items: Sequence[Item]) -> list[int]:
    """Return the item positions at which a truncated conversation may begin, in ascending order.

    Positions are 0-based indices of `items`; 0 is not included. A result is never separated from its call, and
    reasoning or a preamble never from the message or call after it. The instructions are not items, so they always
    remain. The running time is linear in the number of items.
    """
    first_calls: dict[str, int] = {}
    for position, item in enumerate(items):
        if isinstance(item, AssistantCall):
            first_calls.setdefault(item.call_id, position)
    starts: list[int] = []
    # Ids of later results whose call is at an earlier position.
    separated: set[str] = set()
    for position in range(len(items) - 1, 0, -1):
        item = items[position]
        match item:
            case ToolResult(call_id=call_id) if first_calls.get(call_id, position) < position:
                separated.add(call_id)
            case AssistantCall(call_id=call_id):
                separated.discard(call_id)
            case _:
                pass
        if not separated and _starts_unit(items[position - 1], item):
            starts.append(position)
    return starts[::-1]


def _starts_unit(before: Item, item: Item) -> bool:
    match item:
        case UserMessage() | DeveloperMessage():
            return True
        case ToolResult() | AddedTools():
            return False
        case _:
            is_preamble = isinstance(before, AssistantMessage) and before.phase is Phase.COMMENTARY
            return not (is_preamble or isinstance(before, AssistantReasoning))


def _always_kept(items: Sequence[Item]) -> list[int]:
    """Return the positions of the items that are never dropped, in ascending order."""
    # The model may still call the tools that a dropped item added.
    kept = {position for position, item in enumerate(items) if isinstance(item, AddedTools)}
    messages = {at: item.text for at, item in enumerate(items) if isinstance(item, UserMessage)}
    newest = {text.startswith(SUMMARY_HEADINGS): at for at, text in messages.items()}
    return sorted(kept.union(newest.values()))


def _shortened(renderer: Renderer, conversation: Conversation, tools: ToolSet, limit: int) -> tuple[Conversation, int]:
    """Shorten the longest texts for a prompt of `limit` tokens; also return their number.

    The last item is not shortened.
    """
    *items, last = conversation.items
    fixed = (*(item for item in items if isinstance(item, AddedTools)), last)
    room = limit - len(renderer.prompt(replace(conversation, items=fixed), tools))
    sizes = [0 if isinstance(item, AddedTools) else len(renderer.item(item, tools)) for item in items]
    maximum = _common_maximum(sizes, room)
    shorter = [
        _without_middle(renderer.encoding, item, size - maximum) if size > maximum else item
        for item, size in zip(items, sizes, strict=True)
    ]
    return replace(conversation, items=(*shorter, last)), sum(size > maximum for size in sizes)


def _common_maximum(sizes: Sequence[int], room: int) -> int:
    """Return the largest maximum with which all sizes fit into `room`.

    Sizes above the maximum are reduced to the maximum.
    """
    for index, size in enumerate(sorted(sizes)):
        share = max(room, 0) // (len(sizes) - index)
        if size > share:
            return share
        room -= size
    return max(sizes, default=0)


def _without_middle(encoding: Encoding, item: Item, surplus: int) -> Item:
    """Remove the middle of an item's text: at least `surplus` tokens, if it has so many."""
    field = _TEXT_FIELDS.get(type(item), "text")
    tokens = encoding.encode_text(getattr(item, field))
    half = max(len(tokens) - surplus - SHORTENED_TOKENS, 0) // 2
    # A token may end inside a character; the bytes of this character are dropped.
    head, tail = (
        encoding.decode_bytes(part).decode(errors="ignore") for part in (tokens[:half], tokens[len(tokens) - half :])
    )
    changes: dict[str, Any] = {field: head + SHORTENED + tail}
    if hasattr(item, "tokens"):
        changes["tokens"] = ()
    return replace(item, **changes)
