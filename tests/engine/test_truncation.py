"""Truncation of long conversations by whole turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.conversation import (
    AssistantCall,
    AssistantMessage,
    Conversation,
    Item,
    Preamble,
    ToolResult,
    UserMessage,
)
from unisono.engine.prompt import later_starts

CALLED = AssistantCall("c", "f", "{}")

DROPS: dict[str, tuple[list[Item], list[Item] | None]] = {
    "one turn": ([UserMessage("a"), AssistantMessage("b")], None),
    "no items": ([], None),
    "two turns": ([UserMessage("a"), AssistantMessage("b"), UserMessage("c")], [UserMessage("c")]),
    "calls go with their turn": (
        [UserMessage("a"), CALLED, ToolResult("c", "f", "x"), UserMessage("b"), AssistantMessage("y")],
        [UserMessage("b"), AssistantMessage("y")],
    ),
    "no result without its call": (
        [UserMessage("a"), CALLED, UserMessage("b"), ToolResult("c", "f", "x"), UserMessage("d")],
        [UserMessage("d")],
    ),
}


def without_oldest_turn(conversation: Conversation) -> Conversation | None:
    """Return the conversation without its oldest turn; None if only one turn is left."""
    starts = later_starts(conversation.items)
    return replace(conversation, items=conversation.items[starts[0] :]) if starts else None


@pytest.mark.parametrize(("items", "expected"), DROPS.values(), ids=DROPS)
def test_truncation_drops_whole_turns(items: list[Item], expected: list[Item] | None) -> None:
    shorter = without_oldest_turn(Conversation(Preamble("Be brief."), tuple(items)))
    assert (None if shorter is None else list(shorter.items)) == expected
    assert shorter is None or shorter.preamble.instructions == "Be brief."


items_strategy = st.one_of(
    st.just(UserMessage("a")),
    st.just(AssistantMessage("b")),
    st.sampled_from("cd").map(lambda call: AssistantCall(call, "f", "{}")),
    st.sampled_from("cd").map(lambda call: ToolResult(call, "f", "x")),
)


@given(st.lists(items_strategy, max_size=12))
def test_dropping_turns_reaches_every_later_start(items: list[Item]) -> None:
    conversation: Conversation | None = Conversation(Preamble(), tuple(items))
    reached: list[int] = []
    while conversation is not None and (conversation := without_oldest_turn(conversation)) is not None:
        reached.append(len(items) - len(conversation.items))
        called = {item.call_id for item in conversation.items if isinstance(item, AssistantCall)}
        assert all(item.call_id in called for item in conversation.items if isinstance(item, ToolResult))
    assert reached == later_starts(items)
