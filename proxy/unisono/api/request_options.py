"""Options of a request, common to all API surfaces."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, WithJsonSchema

from unisono.api.field_types import (
    LogitBias,
    MinP,
    OpenModel,
    Penalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    invalid_field,
)
from unisono.api.model_rules import NO_DEFAULTS, AnswerDefaults
from unisono.core.conversation import Effort
from unisono.core.generation import Sampling
from unisono.engine.request import RequestFields

# Names of request fields that the engine's errors refer to.


def request_fields(
    conversation: str,
    request: SamplingFields | None = None,
    *,
    tool: str = "tools.{index}",
    tool_schema: str = "parameters",
    logprobs: str = "logprobs",
) -> RequestFields:
    """Return the field names of an API surface. `conversation` is the field of the conversation."""
    sampling = frozenset[str]() if request is None else _SAMPLING_FIELDS & request.__pydantic_fields_set__
    return RequestFields(conversation, "tools", tool, tool_schema, "logit_bias", logprobs, sampling)


# Reasoning effort.

# Accepted spellings of an effort, and the corresponding effort of gpt-oss.
EFFORTS: Final = {
    "none": Effort.LOW,
    "minimal": Effort.LOW,
    "low": Effort.LOW,
    "medium": Effort.MEDIUM,
    "high": Effort.HIGH,
    "xhigh": Effort.HIGH,
    "max": Effort.HIGH,
}


def to_effort(value: Any) -> Effort | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in EFFORTS:
        raise invalid_field(f"must be one of {', '.join(EFFORTS)}")
    return EFFORTS[value]


SpelledEffort = Annotated[Effort | None, BeforeValidator(to_effort), WithJsonSchema({"enum": [*EFFORTS, None]})]


# Sampling fields common to all API surfaces, and their conversion.


class SamplingFields(OpenModel):
    """Sampling fields of a request. A field that is null or absent has its default."""

    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None


_SAMPLING_FIELDS: Final = frozenset(SamplingFields.model_fields)


def to_sampling(fields: SamplingFields, defaults: AnswerDefaults = NO_DEFAULTS) -> Sampling:
    """Return each sampling value from the request, else from `defaults`, else from `Sampling`."""
    return Sampling(**{**defaults.sampling, **sampling_in(fields)})


def sampling_in(fields: SamplingFields) -> dict[str, Any]:
    """Return the values of the sampling fields that are present in a request and not null."""
    sent = _SAMPLING_FIELDS & fields.__pydantic_fields_set__
    values = {name: value for name in sent if (value := getattr(fields, name)) is not None}
    if "top_k" in values:
        values["top_k"] = max(0, values["top_k"])
    return values


# Field names for reasoning in answers.


class ReasoningField(StrEnum):
    """Answer fields that contain the reasoning: by default both, because clients read either."""

    BOTH = "both"
    REASONING = "reasoning"
    REASONING_CONTENT = "reasoning_content"
    NONE = "none"

    @property
    def names(self) -> tuple[str, ...]:
        return REASONING_NAMES[self]


# Values by their names in the configuration.
REASONING_FIELDS: Final = {each.value: each for each in ReasoningField}
REASONING_NAMES: dict[ReasoningField, tuple[str, ...]] = {
    ReasoningField.BOTH: ("reasoning", "reasoning_content"),
    ReasoningField.REASONING: ("reasoning",),
    ReasoningField.REASONING_CONTENT: ("reasoning_content",),
    ReasoningField.NONE: (),
}
