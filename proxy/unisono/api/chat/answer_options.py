"""Options of Chat Completions that clients send in different fields, and defaults of models.

The defaults that the operator configures for a model have the same fields as a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from pydantic import ValidationError

from unisono.api.chat.schema import ChatRequest
from unisono.api.error_responses import failure_of
from unisono.api.field_types import smallest
from unisono.api.model_rules import AnswerDefaults
from unisono.api.request_options import SamplingFields, sampling_in
from unisono.api.structured_outputs import StructuredFields, to_answer_form
from unisono.core.conversation import AnswerForm, Effort
from unisono.errors import InvalidRequest, UnsupportedValue


def requested_form(request: ChatRequest) -> AnswerForm | None:
    """Return the required form of the answer; None for free text.

    Raises InvalidRequest if several fields require a form, or if the form cannot be checked.
    """
    form = request.response_format
    return to_answer_form(request, form.form("response_format") if form is not None else None)


# Fields that set a reasoning effort or budget.
REASONING_FIELDS: Final = frozenset(
    {
        *("reasoning", "reasoning_effort", "reasoning_budget", "think", "thinking", "thinking_budget"),
        *("thinking_token_budget", "chat_template_kwargs", "output_config"),
    }
)
# Fields that set a reasoning effort, each with the effort. The first entry is used.
RequestedEfforts: TypeAlias = Sequence[tuple[str, Effort]]


def notes_on_effort(efforts: RequestedEfforts) -> Iterator[str]:
    """Yield a note on each field whose effort is not used, because the first field differs."""
    for field, effort in efforts[1:]:
        if effort != efforts[0][1]:
            yield f"{field}: no effect, because {efforts[0][0]} is set"


def requested_efforts(request: ChatRequest) -> RequestedEfforts:
    """Return the fields of a request that set an effort, each with the effort."""
    if REASONING_FIELDS.isdisjoint(request.__pydantic_fields_set__):
        return ()
    # OpenAI, OpenRouter, Ollama, vLLM and Anthropic have different fields.
    template = request.chat_template_kwargs
    spelled: dict[str, Effort | None] = {
        "reasoning_effort": request.reasoning_effort,
        "reasoning.effort": request.reasoning.effort if request.reasoning else None,
        "think": request.think,
        "chat_template_kwargs.reasoning_effort": template.reasoning_effort if template else None,
        "output_config.effort": request.output_config.effort if request.output_config else None,
        "thinking": Effort.LOW if request.thinking and request.thinking.type == "disabled" else None,
        "reasoning.enabled": Effort.LOW if request.reasoning and request.reasoning.enabled is False else None,
    }
    return [(field, effort) for field, effort in spelled.items() if effort is not None]


def budgets(request: ChatRequest) -> tuple[int | None, ...]:
    """Return the values of all fields that can set a reasoning budget; None for a missing one."""
    if REASONING_FIELDS.isdisjoint(request.__pydantic_fields_set__):
        return ()
    return (
        request.reasoning.max_tokens if request.reasoning else None,
        request.thinking.budget_tokens if request.thinking else None,
        request.chat_template_kwargs.thinking_budget if request.chat_template_kwargs else None,
        request.thinking_token_budget,
        request.thinking_budget,
        request.reasoning_budget,
    )


def requested_logprobs(request: ChatRequest) -> int | None:
    """Return the number of alternatives to report per token; None for no log probabilities.

    Raises InvalidRequest for `top_logprobs` without `logprobs`.
    """
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("'top_logprobs' requires 'logprobs: true'.", param="top_logprobs")
    return request.top_logprobs or 0 if request.logprobs else None


def shows_reasoning(request: ChatRequest) -> bool:
    """Return False if the request excludes reasoning from the answer."""
    is_excluded = request.reasoning is not None and request.reasoning.exclude
    return request.include_reasoning is not False and not is_excluded


# Fields that can have a default. A default applies to the requests of every API.
SUPPORTED: Final = frozenset(
    (
        *SamplingFields.model_fields,
        *StructuredFields.model_fields,
        *("max_tokens", "max_completion_tokens", "stop", "response_format", "parallel_tool_calls"),
        *(REASONING_FIELDS - {"output_config"}),
    )
)


def to_answer_defaults(fields: Mapping[str, Any]) -> AnswerDefaults:
    """Return the defaults of a model from `fields`, in the form of a Chat Completions request.

    Raises InvalidRequest for an invalid or unsupported field; its `param` names the field.
    """
    for name in fields:
        if name not in SUPPORTED:
            raise UnsupportedValue("cannot have a default here; remove it", param=name)
    try:
        request = ChatRequest.model_validate({**fields, "model": "-", "messages": [{"role": "user", "content": "-"}]})
    except ValidationError as error:
        raise failure_of(error) from None
    without_effect = {f"reasoning.{name}" for name in (request.reasoning and request.reasoning.model_fields_set) or ()}
    for name in sorted(without_effect - {"reasoning.effort", "reasoning.max_tokens", "reasoning.enabled"}):
        raise UnsupportedValue("cannot have a default here; remove it", param=name)
    efforts = requested_efforts(request)
    return AnswerDefaults(
        sampling=sampling_in(request),
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stop=tuple(request.stop),
        effort=efforts[0][1] if efforts else None,
        form=requested_form(request),
        parallel_calls=request.parallel_tool_calls is not False,
        reasoning_budget=smallest(budgets(request)),
    )
