"""Field types and base class of the Pydantic models for responses.

The model of a `direct` endpoint only describes the response in the OpenAPI document. `outbound` writes the response
without the model, and `make test-openapi` checks that the response fits the model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Moment = Annotated[int, Field(description="Unix time in seconds.")]
Object = dict[str, Any]
# The default of a field that may be absent but is never null.
ABSENT: Any = None


class AnswerModel(BaseModel):
    """Base class of the objects in responses.

    An object may have fields that its class does not declare. Pydantic builds the validator on first use.
    """

    model_config = ConfigDict(extra="allow", defer_build=True)


class About(AnswerModel):
    """Object `unisono` of an answer: backend, failovers, recoveries and notes."""

    recoveries: list[str]
    failovers: Count
    backend: str
    left_out: Count = ABSENT
    unmet: str = ABSENT
    hooks: Object = ABSENT
    notes: list[str] = ABSENT


class Deleted(AnswerModel):
    id: str
    object: str
    deleted: Literal[True]


class CachedTokens(AnswerModel):
    cached_tokens: Count


class CompletionObject(AnswerModel):
    """Fields common to chat completions, completions, and their chunks."""

    id: str
    created: Moment
    model: str
    system_fingerprint: str | None


class TokenUsageObject(AnswerModel):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
