"""Models of the answers of the Completions API."""

from __future__ import annotations

from typing import Literal

from unisono.api.answer_types import ABSENT, About, Answer, CachedTokens, Count, Moment


class CompletionChoice(Answer):
    index: Count
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | Count | None
    token_ids: list[Count] = ABSENT
    prompt_token_ids: list[Count] | None = None


class CompletionUsage(Answer):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: Moment
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: CompletionUsage
    unisono: About


class CompletionDelta(Answer):
    index: Count
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | Count | None = None
    token_ids: list[Count] = ABSENT
    prompt_token_ids: list[Count] | None = None


class CompletionChunk(Answer):
    id: str
    object: Literal["text_completion"]
    created: Moment
    model: str
    system_fingerprint: str | None
    choices: list[CompletionDelta]
    usage: CompletionUsage | None = None
    unisono: About = ABSENT
