"""Models of the answers of the Responses API."""

from __future__ import annotations

from typing import Literal

from unisono.api.answer_types import ABSENT, About, Answer, Count, Moment, Object
from unisono.core.state_store import Status


class Item(Answer):
    id: str
    type: str


class ItemPage(Answer):
    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Typed(Answer):
    type: str


class ResponseFailure(Answer):
    code: str
    message: str


class IncompleteDetails(Answer):
    reason: str


class ResponseConversation(Answer):
    id: str


class ResponseReasoning(Answer):
    effort: str
    summary: str | None


class ResponseText(Answer):
    format: Typed
    verbosity: str


class ResponseInputDetails(Answer):
    cached_tokens: Count
    cache_write_tokens: Count


class ResponseOutputDetails(Answer):
    reasoning_tokens: Count
    tool_output_tokens: Count = ABSENT


class ResponseUsage(Answer):
    input_tokens: Count
    input_tokens_details: ResponseInputDetails
    output_tokens: Count
    output_tokens_details: ResponseOutputDetails
    total_tokens: Count


class Response(Answer):
    """A response; `unisono` is absent while it is in progress."""

    id: str
    object: Literal["response"]
    created_at: Moment
    status: Status
    completed_at: Moment | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[Item]
    usage: ResponseUsage | None
    background: bool
    conversation: ResponseConversation | None
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: Count | None
    max_tool_calls: Count | None
    metadata: Object
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | Typed
    tools: list[Typed]
    top_logprobs: Count
    top_p: float
    truncation: str
    user: str | None
    unisono: About = ABSENT


class ResponseEvent(Answer):
    type: str
    sequence_number: Count
    response: Response = ABSENT
    item: Item = ABSENT
    delta: str = ABSENT


class InputTokens(Answer):
    object: Literal["response.input_tokens"]
    input_tokens: Count


class Compaction(Answer):
    id: str
    object: Literal["response.compaction"]
    created_at: Moment
    output: list[Item]
    usage: ResponseUsage
    unisono: About
