"""Models of the answers of the Responses API."""

from __future__ import annotations

from typing import Literal

from unisono.api.answer_types import ABSENT, About, AnswerModel, CachedTokens, Count, Moment, Object
from unisono.core.state_store import Status


class Item(AnswerModel):
    id: str
    type: str


class StoredReport(AnswerModel):
    """Report on stored items: content that was left out, and fields without effect."""

    recoveries: list[str]
    notes: list[str]


class ItemPage(AnswerModel):
    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AddedItemPage(ItemPage):
    unisono: StoredReport = ABSENT


class Typed(AnswerModel):
    type: str


class ResponseFailure(AnswerModel):
    code: str
    message: str


class IncompleteDetails(AnswerModel):
    reason: str


class ResponseConversation(AnswerModel):
    id: str


class ResponseReasoning(AnswerModel):
    effort: str
    summary: str | None


class ResponseText(AnswerModel):
    format: Typed
    verbosity: str


class ResponseInputDetails(CachedTokens):
    cache_write_tokens: Count


class ResponseOutputDetails(AnswerModel):
    reasoning_tokens: Count
    tool_output_tokens: Count = ABSENT


class ResponseUsage(AnswerModel):
    input_tokens: Count
    input_tokens_details: ResponseInputDetails
    output_tokens: Count
    output_tokens_details: ResponseOutputDetails
    total_tokens: Count


class Response(AnswerModel):
    """A response. `unisono` is absent while the response is in progress."""

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


class ResponseEvent(AnswerModel):
    type: str
    sequence_number: Count
    response: Response = ABSENT
    item: Item = ABSENT
    delta: str = ABSENT


class InputTokens(AnswerModel):
    object: Literal["response.input_tokens"]
    input_tokens: Count


class Compaction(AnswerModel):
    id: str
    object: Literal["response.compaction"]
    created_at: Moment
    output: list[Item]
    usage: ResponseUsage
    unisono: About
