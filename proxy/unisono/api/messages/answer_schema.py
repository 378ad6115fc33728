"""Models of the responses of the Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from unisono.api.answer_types import ABSENT, About, AnswerModel, Count, Object


class AnsweredText(AnswerModel):
    type: Literal["text"]
    text: str


class AnsweredThinking(AnswerModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(AnswerModel):
    type: Literal["tool_use", "server_tool_use", "mcp_tool_use"]
    id: str
    name: str
    server_name: str = ABSENT
    input: Object


class AnsweredToolResult(AnswerModel):
    type: Annotated[str, Field(pattern="_tool_result$")]
    tool_use_id: str
    is_error: bool = ABSENT
    content: Any
    encrypted_content: str = ABSENT


class AnsweredCompaction(AnswerModel):
    type: Literal["compaction"]
    content: str | None
    encrypted_content: str | None


AnsweredBlock = AnsweredText | AnsweredThinking | AnsweredToolUse | AnsweredToolResult | AnsweredCompaction


class RefusalDetails(AnswerModel):
    type: Literal["refusal"]
    category: None
    explanation: str | None


class OutputDetails(AnswerModel):
    thinking_tokens: Count


class MessageUsage(AnswerModel):
    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: OutputDetails
    server_tool_use: Object = ABSENT
    iterations: list[Object] = ABSENT


class ClearedContext(AnswerModel):
    type: Literal["clear_tool_uses_20250919", "clear_thinking_20251015"]
    cleared_input_tokens: Count
    cleared_tool_uses: Count = ABSENT
    cleared_thinking_turns: Count = ABSENT


class AppliedEdits(AnswerModel):
    applied_edits: list[ClearedContext]


class Message(AnswerModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: Literal[
        "end_turn",
        "max_tokens",
        "stop_sequence",
        "tool_use",
        "pause_turn",
        "compaction",
        "refusal",
        "model_context_window_exceeded",
    ]
    stop_sequence: str | None
    stop_details: RefusalDetails | None
    usage: MessageUsage
    context_management: AppliedEdits = ABSENT
    unisono: About


class MessageEvent(AnswerModel):
    type: str
    message: Object = ABSENT
    index: Count = ABSENT
    content_block: AnsweredBlock = ABSENT
    delta: Object = ABSENT
    usage: Object = ABSENT
    context_management: AppliedEdits = ABSENT


class OriginalTokens(AnswerModel):
    original_input_tokens: Count


class MessageTokens(AnswerModel):
    input_tokens: Count
    context_management: OriginalTokens = ABSENT
