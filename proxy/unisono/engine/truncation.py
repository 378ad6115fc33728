"""What may be left out of a conversation that is too long: whole turns, the oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unisono.core.conversation import AssistantCall, Conversation, Item, ToolResult, UserMessage


def without_oldest_turn(conversation: Conversation) -> Conversation | None:
    """The conversation without its oldest turn: everything up to the next message of the user. None when only one turn
    is left. A result never stays behind without its call; the instructions always stay."""
    beginnings = later_beginnings(conversation.items)
    return replace(conversation, items=conversation.items[beginnings[0] :]) if beginnings else None


def later_beginnings(items: Sequence[Item]) -> list[int]:
    """Where a conversation may begin instead, by how many of its oldest turns are left out: the first without the
    oldest, the last with the newest alone. Linear in the items."""
    beginnings: list[int] = []
    called: set[str] = set()
    orphans: set[str] = set()
    for position in range(len(items) - 1, 0, -1):
        match items[position]:
            case ToolResult(call_id=call_id) if call_id not in called:
                orphans.add(call_id)
            case AssistantCall(call_id=call_id):
                called.add(call_id)
                orphans.discard(call_id)
            case UserMessage() if not orphans:
                beginnings.append(position)
            case _:
                pass
    return beginnings[::-1]
