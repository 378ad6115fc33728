"""Conversations in OpenAI's wire form. Their items are listed by `items.to_listing`."""

from __future__ import annotations

from unisono.api.responses.items import Wire
from unisono.core.state_store import StoredConversation


def to_conversation(conversation: StoredConversation) -> Wire:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "metadata": dict(conversation.metadata),
    }


def to_deleted(conversation: str) -> Wire:
    return {"id": conversation, "object": "conversation.deleted", "deleted": True}
