"""Conversion of a raw completion request to generation requests, one per choice.

Nothing is rendered: a prompt is sent to its backend unchanged. Hooks and token counting see the prompt as one user
message in the conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from unisono.api.completions.schema import MAX_CHOICES, CompletionRequest
from unisono.api.model_rules import NO_RULES, ModelRules
from unisono.api.request_options import request_fields, to_sampling
from unisono.api.structured_outputs import refuse_forms
from unisono.api.unused_fields import MAX_NOTES, notes_on_unused
from unisono.core.access import Caller
from unisono.core.conversation import Conversation, Preamble, UserMessage
from unisono.core.frozen import dataclass
from unisono.engine.request import (
    AnswerOptions,
    GenerationRequest,
    PromptOptions,
    RawPrompt,
    RequestOrigin,
    RoutingOptions,
)
from unisono.errors import InvalidRequest, NotAllowed, UnsupportedValue

# OpenAI's default for this API only.
DEFAULT_MAX_TOKENS: Final = 16

# Function that converts token ids to text, with special tokens spelled out.
Spell = Callable[[Sequence[int]], str]

# Function that converts text with spelled special tokens to token ids.
Cut = Callable[[str], Sequence[int]]

SWITCHED_OFF: Final = (
    "Raw completions are disabled on this gateway: use /v1/chat/completions, "
    "or ask the operator to set `unisono: {raw_completions: true}`."
)
NOT_FOR_THIS_KEY: Final = (
    "This key may not send raw prompts: use /v1/chat/completions, or a key created with `unisono keys create --raw`."
)


@dataclass(frozen=True, slots=True)
class CompletionGenerations:
    """Converted request: the generation requests of all choices in order.

    Each prompt has `per_prompt` choices. `texts` has one entry per choice: the text of the prompt if the answer repeats
    the prompt (`echo`), else "".
    """

    requests: tuple[GenerationRequest, ...]
    per_prompt: int
    stream: bool
    include_usage: bool
    has_token_ids: bool
    texts: tuple[str, ...]
    notes: tuple[str, ...]


def check_allowed(caller: Caller, *, switched_on: bool) -> None:
    """Raise NotAllowed if the operator has not enabled raw completions, or not for this key."""
    if not switched_on:
        raise NotAllowed(SWITCHED_OFF)
    if not caller.raw:
        raise NotAllowed(NOT_FOR_THIS_KEY)


def to_generation_requests(
    request: CompletionRequest,
    *,
    model: str,
    caller: Caller,
    request_id: str,
    spell: Spell,
    cut: Cut,
    rules: ModelRules = NO_RULES,
) -> CompletionGenerations:
    """Convert a request to the deployment group `model`.

    `spell` converts token ids to text, and `cut` converts text to token ids. Raises InvalidRequest if the request asks
    for something that the gateway cannot do.
    """
    each = request.n or 1
    if len(request.prompt) * each > MAX_CHOICES:
        raise InvalidRequest(
            f"'prompt': the number of prompts times 'n' must be at most {MAX_CHOICES}.", param="prompt"
        )
    if request.best_of not in (None, each):
        raise UnsupportedValue(
            "'best_of' must be equal to 'n': the gateway generates only the choices that it returns.", param="best_of"
        )
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("'max_tokens': must be at least 1 without 'echo'.", param="max_tokens")
    requests: list[GenerationRequest] = []
    texts: list[str] = []
    for prompt in request.prompt:
        if isinstance(prompt, str):
            text, raw = prompt, _raw(request, prompt, tuple(cut(prompt)) if request.return_token_ids else ())
        else:
            text, raw = spell(prompt), _raw(request, None, prompt)
        first = _generation_request(request, raw, text, model=model, caller=caller, request_id=request_id, rules=rules)
        texts += [text if request.echo else ""] * each
        requests += [_choice(first, len(requests) + again, again) for again in range(each)]
    options = request.stream_options
    refuse_forms(request, "use /v1/chat/completions")
    return CompletionGenerations(
        requests=tuple(requests),
        per_prompt=each,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        has_token_ids=bool(request.return_token_ids),
        texts=tuple(texts),
        notes=tuple(notes_on_unused(request))[:MAX_NOTES],
    )


def _choice(first: GenerationRequest, position: int, repetition: int) -> GenerationRequest:
    """Return the request of one choice.

    `position` is the 0-based index of the choice in the answer. `repetition` is its 0-based index among the choices of
    the same prompt.
    """
    if position:
        request_id = f"{first.origin.request_id}-{position}"
        first = replace(first, origin=replace(first.origin, request_id=request_id))
    # With equal seeds, all choices of a prompt would be the same.
    sampling = first.answer.sampling.with_next_seed(repetition)
    if sampling is not first.answer.sampling:
        first = replace(first, answer=replace(first.answer, sampling=sampling))
    return first


def _generation_request(
    request: CompletionRequest,
    raw: RawPrompt,
    text: str,
    *,
    model: str,
    caller: Caller,
    request_id: str,
    rules: ModelRules,
) -> GenerationRequest:
    usual = rules.defaults.max_tokens or DEFAULT_MAX_TOKENS
    return GenerationRequest(
        model=model,
        conversation=Conversation(Preamble(), (UserMessage(text),)),
        raw=raw,
        answer=AnswerOptions(
            sampling=to_sampling(request, rules.defaults),
            max_tokens=usual if request.max_tokens is None else request.max_tokens,
            stop=tuple(request.stop) or rules.defaults.stop,
            whole=not request.stream,
        ),
        logprobs=request.logprobs,
        origin=RequestOrigin(tenant=caller.tenant, caller=caller, request_id=request_id, surface="completions"),
        routing=RoutingOptions(failover=rules.failover),
        prompt=PromptOptions(fields=request_fields("prompt", request)),
    )


def _raw(request: CompletionRequest, text: str | None, tokens: tuple[int, ...]) -> RawPrompt:
    return RawPrompt(
        text=text,
        tokens=tokens,
        hides_special=request.skip_special_tokens is not False,
        stop_tokens=frozenset(request.stop_token_ids or ()),
        shows_stop=bool(request.include_stop_str_in_output),
        has_prompt_logprobs=bool(request.echo) and request.logprobs is not None,
    )
