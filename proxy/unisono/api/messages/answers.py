"""Models of the answers of the Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from unisono.api.answer_types import ABSENT, About, Answer, Count, Object


class AnsweredText(Answer):
    type: Literal["text"]
    text: str


class AnsweredThinking(Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(Answer):
    type: Literal["tool_use", "server_tool_use"]
    id: str
    name: str
    input: Object


class AnsweredToolResult(Answer):
    type: Annotated[str, Field(pattern="_tool_result$")]
    tool_use_id: str
    content: Any


AnsweredBlock = AnsweredText | AnsweredThinking | AnsweredToolUse | AnsweredToolResult


class RefusalDetails(Answer):
    type: Literal["refusal"]
    category: None
    explanation: str | None


class OutputDetails(Answer):
    thinking_tokens: Count


class MessageUsage(Answer):
    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: OutputDetails
    server_tool_use: Object = ABSENT


class Message(Answer):
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
        "refusal",
        "model_context_window_exceeded",
    ]
    stop_sequence: str | None
    stop_details: RefusalDetails | None
    usage: MessageUsage
    unisono: About


class MessageEvent(Answer):
    type: str
    message: Object = ABSENT
    index: Count = ABSENT
    content_block: AnsweredBlock = ABSENT
    delta: Object = ABSENT
    usage: Object = ABSENT


class MessageTokens(Answer):
    input_tokens: Count
