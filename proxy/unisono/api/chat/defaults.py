"""Conversion of a model's configured defaults from the fields of Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from unisono.api.chat.answer_options import REASONING_FIELDS, budgets, requested_efforts, requested_form
from unisono.api.chat.schema import ChatRequest
from unisono.api.error_responses import failure_of
from unisono.api.field_types import smallest
from unisono.api.model_rules import AnswerDefaults
from unisono.api.request_options import SamplingFields, sampling_in
from unisono.api.structured_outputs import StructuredFields
from unisono.errors import UnsupportedValue

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
