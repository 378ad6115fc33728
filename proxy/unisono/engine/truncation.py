"""Truncation of conversations that are too long: whole turns are dropped, oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unisono.core.conversation import AssistantCall, Conversation, Item, ToolResult, UserMessage


def without_oldest_turn(conversation: Conversation) -> Conversation | None:
    """Return the conversation without its oldest turn; None if only one turn is left.

    A turn ends before the next user message. A result is never separated from its call. The instructions always remain.
    """
    beginnings = later_beginnings(conversation.items)
    return replace(conversation, items=conversation.items[beginnings[0] :]) if beginnings else None


def later_beginnings(items: Sequence[Item]) -> list[int]:
    """Return the item positions at which a truncated conversation may begin.

    The first position drops the oldest turn, the last one all turns but the newest. Linear in the number of items.
    """
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
