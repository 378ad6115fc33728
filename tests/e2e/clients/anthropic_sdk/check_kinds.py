"""Every kind of message, content block and tool that the SDK declares: accepted, and read or reported.

The table is made from the SDK's types, so that a new kind fails here first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam, ToolUnionParam
from anthropic.types.beta import BetaContentBlockParam, BetaMessageParam, BetaToolUnionParam
from anthropic.types.beta.beta_tool_result_block_param import Content
from anthropic_sdk.messaging import WEATHER, scripted_request, text_of
from sdk_types import (
    ID,
    PROMPT,
    WORD,
    Json,
    check_known,
    examples,
    is_typeddict,
    kind_name,
    kind_names,
    members,
)

KNOWN = Path(__file__).with_name("kinds.txt")
BLOCKS = {kind_name(kind): kind for kind in members(BetaContentBlockParam) if is_typeddict(kind)}
INNER = {**BLOCKS, **{kind_name(kind): kind for kind in members(Content)}}
TOOLS = {kind.__name__: kind for kind in (*members(BetaToolUnionParam), *members(ToolUnionParam))}
SYSTEMS = {kind.__name__: kind for union in (MessageParam, BetaMessageParam) for kind in members(union)}
# Kinds with results of tools, and the call that they answer.
CALLS = {"tool_result": "tool_use", "mcp_tool_result": "mcp_tool_use"}
TOOL_USE: Json = {"type": "tool_use", "id": ID, "name": WORD, "input": {}}
QUESTION: Json = {"role": "user", "content": "Hello"}


def blocks_of(kind: Any) -> list[Json]:
    """Return examples of a block; those of a whole kind of tools are in the table of tools."""
    return [*examples(kind), *examples(kind, full=True)]


def call_for(kind: str, role: str) -> list[Json]:
    """Return the blocks of the assistant that a block of a kind answers."""
    if not kind.endswith("_result") or kind == "search_result":
        return []
    return [{**TOOL_USE, "type": CALLS.get(kind, "server_tool_use")}]


def prompt_for(client: Anthropic, messages: list[Json], **more: Any) -> tuple[str, list[str]]:
    """Return the prompt that a model reads for messages before a newest one, and the notes."""
    fields = scripted_request(PROMPT, **more)
    message: Any = client.messages.create(**{**fields, "messages": [*messages, *fields["messages"]]})
    return text_of(message), message.model_extra["unisono"].get("notes", [])


def placed(kind: str, role: str, block: Json) -> tuple[list[Json], str]:
    """Return messages with a block in a message of a role, and the position of the block."""
    calls = call_for(kind, role)
    if role == "assistant":
        return [QUESTION, {"role": role, "content": [*calls, block]}], f"messages.1.content.{len(calls)}"
    before = [QUESTION, {"role": "assistant", "content": calls}] if calls else []
    return [*before, {"role": role, "content": [block]}], f"messages.{len(before)}.content.0"


def in_result(block: Json) -> tuple[list[Json], str]:
    result = {"type": "tool_result", "tool_use_id": ID, "content": [block]}
    messages = [QUESTION, {"role": "assistant", "content": [TOOL_USE]}, {"role": "user", "content": [result]}]
    return messages, "messages.2.content.0.content.0"


def places(kind: str, block: Json) -> Iterator[tuple[list[Json], str]]:
    if kind in BLOCKS:
        yield from (placed(kind, role, block) for role in ("user", "assistant", "system"))
    yield in_result(block)


def without(messages: list[Json], block: Json) -> list[Json]:
    """Return the messages with an empty text in place of a block."""

    def replaced(value: Any) -> Any:
        if value is block:
            return {"type": "text", "text": ""}
        if isinstance(value, list):
            return [replaced(each) for each in value]
        return {name: replaced(each) for name, each in value.items()} if isinstance(value, dict) else value

    return [replaced(message) for message in messages]


def test_every_kind_is_known() -> None:
    messages = (*kind_names(BetaMessageParam, "beta messages"), *kind_names(MessageParam, "messages"))
    tools = (*kind_names(BetaToolUnionParam, "beta tools", 0), *kind_names(ToolUnionParam, "tools", 0))
    check_known((*messages, *tools), KNOWN)


@pytest.mark.parametrize("kind", INNER)
def test_a_kind_of_block_is_accepted_and_read_or_reported(scripted: Anthropic, kind: str) -> None:
    for block in blocks_of(INNER[kind]):
        for messages, at in places(kind, block):
            prompt, notes = prompt_for(scripted, messages)
            is_reported = any(note.startswith(at) for note in notes)
            assert is_reported or prompt != prompt_for(scripted, without(messages, block))[0], messages


@pytest.mark.parametrize("kind", SYSTEMS)
def test_a_kind_of_message_is_accepted(scripted: Anthropic, kind: str) -> None:
    for message in blocks_of(SYSTEMS[kind]):
        if isinstance(message.get("content"), str) or message["role"] == "system":
            prompt, notes = prompt_for(scripted, [QUESTION, message])
            assert notes or prompt != prompt_for(scripted, [QUESTION])[0], message


@pytest.mark.parametrize("kind", TOOLS)
def test_a_kind_of_tool_beside_a_function_is_declared_or_reported(scripted: Anthropic, kind: str) -> None:
    for tool in blocks_of(TOOLS[kind]):
        prompt, notes = prompt_for(scripted, [], tools=[WEATHER, tool])
        alone, _ = prompt_for(scripted, [], tools=[WEATHER])
        assert "get_weather" in prompt
        assert prompt != alone or any(note.startswith("tools.1") for note in notes), tool
