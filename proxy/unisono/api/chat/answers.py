"""Models of the answers of the Chat Completions API."""

from __future__ import annotations

from typing import Literal

from unisono.api.answer_types import ABSENT, About, Answer, CachedTokens, Count, Moment, Object

Finished = Literal["stop", "length", "tool_calls", "function_call"]


class AnsweredFunction(Answer):
    name: str
    arguments: str


class CalledTool(Answer):
    name: str
    input: str


class FunctionCall(Answer):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class CustomCall(Answer):
    id: str
    type: Literal["custom"]
    custom: CalledTool


class ChatAnswer(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    annotations: list[Object]
    reasoning: str = ABSENT
    reasoning_content: str = ABSENT
    tool_calls: list[FunctionCall | CustomCall] = ABSENT
    function_call: AnsweredFunction = ABSENT


class ChatChoice(Answer):
    index: Count
    message: ChatAnswer
    logprobs: None
    finish_reason: Finished


class CompletionDetails(Answer):
    reasoning_tokens: Count


class ChatUsage(Answer):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: Moment
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: ChatUsage
    unisono: About


class CallDelta(Answer):
    index: Count


class ChatDelta(Answer):
    role: Literal["assistant"] = ABSENT
    content: str = ABSENT
    refusal: str = ABSENT
    reasoning: str = ABSENT
    reasoning_content: str = ABSENT
    tool_calls: list[CallDelta] = ABSENT
    function_call: Object = ABSENT


class ChunkChoice(Answer):
    index: Count
    delta: ChatDelta
    logprobs: None
    finish_reason: Finished | None


class ChatCompletionChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: Moment
    model: str
    system_fingerprint: str | None
    choices: list[ChunkChoice]
    usage: ChatUsage | None = None
    unisono: About = ABSENT
