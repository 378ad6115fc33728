"""What `truncation: auto` may leave out of a conversation that is too long: whole turns, the oldest first."""

from __future__ import annotations

from dataclasses import replace

from unisono.core.conversation import AssistantCall, Conversation, ToolResult, UserMessage


def without_oldest_turn(conversation: Conversation) -> Conversation | None:
    """The conversation without its oldest turn: everything up to the next message of the user. None when only one turn
    is left. A result never stays behind without its call; the instructions always stay."""
    items = conversation.items
    for position in range(1, len(items)):
        if not isinstance(items[position], UserMessage):
            continue
        left = items[position:]
        called = {item.call_id for item in left if isinstance(item, AssistantCall)}
        if all(item.call_id in called for item in left if isinstance(item, ToolResult)):
            return replace(conversation, items=left)
    return None
