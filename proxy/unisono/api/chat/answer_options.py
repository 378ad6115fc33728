"""Options of a Chat Completions request that different clients spell differently."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.api.chat.schema import ChatRequest
from unisono.api.structured_outputs import to_answer_form
from unisono.core.conversation import AnswerForm, Effort
from unisono.errors import InvalidRequest


def requested_form(request: ChatRequest) -> AnswerForm | None:
    """Return the required form of the answer; None for free text. Raises InvalidRequest."""
    form = request.response_format
    return to_answer_form(request, form.form("response_format") if form is not None else None)


def requested_effort(request: ChatRequest) -> Effort | None:
    """Return the requested reasoning effort; None if no field sets it."""
    # OpenAI, OpenRouter, Ollama, vLLM and Anthropic have different fields. The first one that is set counts.
    spelled = (
        request.reasoning_effort,
        request.reasoning.effort if request.reasoning else None,
        request.think,
        request.chat_template_kwargs.reasoning_effort if request.chat_template_kwargs else None,
        request.output_config.effort if request.output_config else None,
        Effort.LOW if request.thinking and request.thinking.type == "disabled" else None,
        Effort.LOW if request.reasoning and request.reasoning.enabled is False else None,
    )
    return next((effort for effort in spelled if effort is not None), None)


def budgets(request: ChatRequest) -> Iterator[int | None]:
    """Yield the reasoning budget from each of its spellings."""
    yield request.reasoning.max_tokens if request.reasoning else None
    yield request.thinking.budget_tokens if request.thinking else None
    yield request.chat_template_kwargs.thinking_budget if request.chat_template_kwargs else None
    yield from (request.thinking_token_budget, request.thinking_budget, request.reasoning_budget)


def requested_logprobs(request: ChatRequest) -> int | None:
    """Return the number of alternatives to report; None for no log probabilities.

    Raises InvalidRequest.
    """
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs: true'.", param="top_logprobs")
    return request.top_logprobs or 0 if request.logprobs else None
