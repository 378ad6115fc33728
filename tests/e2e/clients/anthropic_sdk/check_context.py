"""Context management through Anthropic's SDK: cleared tool results, compaction, and token counts."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic_sdk.messaging import WEATHER, scripted_request

whole_and_streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
BETAS = ["context-management-2025-06-27", "compact-2026-01-12"]
CALLS: list[dict[str, Any]] = [
    message
    for number in range(5)
    for message in (
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": f"toolu_{number}", "name": "get_weather", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": "rain " * 300}],
        },
    )
]
LONG: list[dict[str, Any]] = [
    {"role": "user", "content": "Tell me about porcelain."},
    {"role": "assistant", "content": "porcelain " * 1500},
    {"role": "user", "content": "script: an answer"},
]


def request(messages: list[dict[str, Any]], *edits: dict[str, Any]) -> dict[str, Any]:
    fields = scripted_request("an answer", tools=[WEATHER], betas=BETAS, context_management={"edits": [*edits]})
    return {**fields, "messages": messages}


def create(client: Anthropic, stream: bool, fields: dict[str, Any]) -> Any:
    if not stream:
        return client.beta.messages.create(**fields)
    with client.beta.messages.stream(**fields) as streaming:
        for _ in streaming:
            pass
        return streaming.get_final_message()


@whole_and_streamed
def test_cleared_tool_uses_are_reported_and_counted(scripted: Anthropic, stream: bool) -> None:
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 500}}
    fields = request([LONG[2], *CALLS], edit)
    message = create(scripted, stream, fields)
    [applied] = message.context_management.applied_edits
    assert (applied.type, applied.cleared_tool_uses) == ("clear_tool_uses_20250919", 2)
    assert applied.cleared_input_tokens > 500
    del fields["max_tokens"]
    counted = scripted.beta.messages.count_tokens(**fields)
    assert counted.context_management is not None
    cleared = counted.context_management.original_input_tokens - counted.input_tokens
    assert cleared == applied.cleared_input_tokens


@whole_and_streamed
def test_a_compaction_block_replaces_the_history_before_it(scripted: Anthropic, stream: bool) -> None:
    edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 1000}}
    first = create(scripted, stream, request(LONG, edit))
    assert [block.type for block in first.content] == ["compaction", "text"]
    assert first.content[0].content == "Here is the answer."
    assert first.content[0].encrypted_content
    assert first.usage.iterations is not None
    assert [each.type for each in first.usage.iterations] == ["compaction", "message"]
    assert first.usage.input_tokens < 500 < first.usage.iterations[0].input_tokens
    messages = [*LONG, {"role": "assistant", "content": first.content}, LONG[2]]
    second = create(scripted, stream, request(messages, edit))
    assert [block.type for block in second.content] == ["text"]
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens < 500


@whole_and_streamed
def test_an_answer_pauses_after_the_compaction(scripted: Anthropic, stream: bool) -> None:
    edit = {
        "type": "compact_20260112",
        "trigger": {"type": "input_tokens", "value": 1000},
        "pause_after_compaction": True,
    }
    paused = create(scripted, stream, request(LONG, edit))
    assert (paused.stop_reason, [block.type for block in paused.content]) == ("compaction", ["compaction"])
    messages = [*LONG, {"role": "assistant", "content": paused.content}]
    message = create(scripted, stream, request(messages, edit))
    assert (message.stop_reason, message.content[0].text) == ("end_turn", "Here is the answer.")


@whole_and_streamed
def test_a_conversation_is_compacted_on_demand(scripted: Anthropic, stream: bool) -> None:
    fields: dict[str, Any] = {**request(LONG), "compaction": {"type": "summarize"}}
    del fields["context_management"]
    message = create(scripted, stream, fields)
    assert (message.stop_reason, [block.type for block in message.content]) == ("compaction", ["compaction"])


def test_an_unknown_edit_is_refused_by_name(scripted: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"context_management\.edits\.0\.type"):
        scripted.beta.messages.create(**request(LONG, {"type": "forget"}))
