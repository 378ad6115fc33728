"""Models of the answers of the Completions API."""

from __future__ import annotations

from typing import Literal

from unisono.api.answer_types import ABSENT, About, AnswerModel, CompletionObject, Count, TokenUsageObject


class CompletionDelta(AnswerModel):
    index: Count
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | Count | None = None
    token_ids: list[Count] = ABSENT
    prompt_token_ids: list[Count] | None = None


class CompletionChoice(CompletionDelta):
    finish_reason: Literal["stop", "length"]
    stop_reason: str | Count | None


class CompletionUsage(TokenUsageObject):
    """Token usage of all choices."""


class Completion(CompletionObject):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: CompletionUsage
    unisono: About


class CompletionChunk(CompletionObject):
    object: Literal["text_completion"]
    choices: list[CompletionDelta]
    usage: CompletionUsage | None = None
    unisono: About = ABSENT
