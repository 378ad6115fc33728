"""Models of the answers of the Chat Completions API."""

from __future__ import annotations

from typing import Literal

from unisono.api.answer_types import ABSENT, About, AnswerModel, CompletionObject, Count, Object, TokenUsageObject

Finished = Literal["stop", "length", "tool_calls", "function_call"]


class AnsweredFunction(AnswerModel):
    name: str
    arguments: str


class CalledTool(AnswerModel):
    name: str
    input: str


class FunctionCall(AnswerModel):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class CustomCall(AnswerModel):
    id: str
    type: Literal["custom"]
    custom: CalledTool


class ChatAnswer(AnswerModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    annotations: list[Object]
    reasoning: str = ABSENT
    reasoning_content: str = ABSENT
    tool_calls: list[FunctionCall | CustomCall] = ABSENT
    function_call: AnsweredFunction = ABSENT


class LogprobEntry(AnswerModel):
    token: str
    logprob: float
    bytes: list[Count]


class TokenLogprobEntry(LogprobEntry):
    top_logprobs: list[LogprobEntry]


class ChoiceLogprobs(AnswerModel):
    content: list[TokenLogprobEntry] | None
    refusal: list[TokenLogprobEntry] | None


class ChatChoice(AnswerModel):
    index: Count
    message: ChatAnswer
    logprobs: ChoiceLogprobs | None
    finish_reason: Finished


class CompletionDetails(AnswerModel):
    reasoning_tokens: Count


class ChatUsage(TokenUsageObject):
    completion_tokens_details: CompletionDetails


class ChatCompletion(CompletionObject):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: ChatUsage
    unisono: About


class CallDelta(AnswerModel):
    index: Count


class ChatDelta(AnswerModel):
    role: Literal["assistant"] = ABSENT
    content: str = ABSENT
    refusal: str = ABSENT
    reasoning: str = ABSENT
    reasoning_content: str = ABSENT
    tool_calls: list[CallDelta] = ABSENT
    function_call: Object = ABSENT


class ChunkChoice(AnswerModel):
    index: Count
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: Finished | None


class ChatCompletionChunk(CompletionObject):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: ChatUsage | None = None
    unisono: About = ABSENT
