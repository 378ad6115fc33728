"""Positions at which a truncated conversation may begin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.conversation import (
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
from unisono.engine.truncation import unit_starts

CALL, RESULT = AssistantCall("c", "f", "{}"), ToolResult("c", "f", "x")
OTHER_CALL, OTHER_RESULT = AssistantCall("d", "f", "{}"), ToolResult("d", "f", "y")
USER, THOUGHT, PREAMBLE = UserMessage("a"), AssistantReasoning("t"), AssistantMessage("p", Phase.COMMENTARY)
ANSWER, RULE, TOOLS = AssistantMessage("b"), DeveloperMessage("r"), AddedTools(())

STARTS: dict[str, tuple[list[Item], list[int]]] = {
    "no items": ([], []),
    "one item": ([USER], []),
    "messages": ([USER, ANSWER, RULE, USER, ANSWER], [1, 2, 3, 4]),
    "reasoning stays with its message": ([USER, THOUGHT, ANSWER], [1]),
    "reasoning and preamble stay with their call": ([USER, THOUGHT, PREAMBLE, CALL, RESULT, USER], [1, 5]),
    "a result stays with its call": ([USER, CALL, USER, RESULT, USER], [1, 4]),
    "parallel calls stay together": ([USER, THOUGHT, CALL, OTHER_CALL, RESULT, OTHER_RESULT, ANSWER], [1, 6]),
    "calls in sequence": ([USER, THOUGHT, CALL, RESULT, THOUGHT, OTHER_CALL, OTHER_RESULT], [1, 4]),
    "calls with the same id": ([USER, CALL, RESULT, CALL, RESULT, CALL, RESULT], [1, 3, 5]),
    "a result without a call": ([USER, RESULT, USER, ANSWER], [2, 3]),
    "a call without a result": ([USER, THOUGHT, CALL, USER], [1, 3]),
    "added tools": ([USER, CALL, RESULT, TOOLS, OTHER_CALL, OTHER_RESULT], [1, 4]),
}


@pytest.mark.parametrize(("items", "expected"), STARTS.values(), ids=STARTS)
def test_a_truncated_conversation_begins_with_a_whole_unit(items: list[Item], expected: list[int]) -> None:
    assert unit_starts(items) == expected


items_strategy = st.one_of(
    st.just(UserMessage("a")),
    st.just(AssistantMessage("b")),
    st.sampled_from("cd").map(lambda call: AssistantCall(call, "f", "{}")),
    st.sampled_from("cd").map(lambda call: ToolResult(call, "f", "x")),
)


@given(st.lists(items_strategy, max_size=12))
def test_truncation_never_separates_a_result_from_its_call(items: list[Item]) -> None:
    for start in unit_starts(items):
        # A result belongs to the last call with its id before it.
        owners: dict[str, int] = {}
        for position, item in enumerate(items):
            if isinstance(item, AssistantCall):
                owners[item.call_id] = position
            elif isinstance(item, ToolResult) and position >= start:
                assert owners.get(item.call_id, start) >= start
