"""Position of the newest compaction block, which replaces everything before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.api.messages.content_blocks import CompactionBlock
from unisono.api.messages.schema import MessageParam


def last_compaction(messages: Sequence[MessageParam]) -> tuple[int, int] | None:
    """Return the index of the message with the newest compaction block, and of the block in it.

    Returns None if there is no compaction block with a summary.
    """
    return next(
        (
            (position, place)
            for position in reversed(range(len(messages)))
            for place in reversed(range(len(messages[position].content)))
            if isinstance(block := messages[position].content[place], CompactionBlock) and block.content
        ),
        None,
    )


async def first_read_position(messages: Sequence[Any]) -> int:
    """Return the index of the first message that the model reads.

    This is the message with the newest compaction block, or 0 if there is no such block.
    """
    # This function runs before validation. It is a coroutine because its counterpart in the Responses API, which has to
    # decrypt items, is one.
    for position in reversed(range(len(messages))):
        content = messages[position].get("content") if isinstance(messages[position], dict) else None
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        if any(block.get("type") == "compaction" and block.get("content") for block in blocks):
            return position
    return 0
