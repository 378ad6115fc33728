"""Fields of raw completion requests: supported, noted as without effect, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from unisono.api.completions.inbound import CompletionGenerations, check_allowed, to_generation_requests
from unisono.api.completions.schema import CompletionRequest
from unisono.api.error_responses import failure_of
from unisono.core.access import Caller
from unisono.core.conversation import UserMessage
from unisono.errors import NotAllowed, UnisonoError

CALLER = Caller("team", raw=True)


def generations_of(**fields: Any) -> CompletionGenerations:
    request = CompletionRequest.model_validate({"model": "gpt-oss", "prompt": "Hi", **fields})
    spell, cut = (lambda ids: "".join(map(chr, ids))), (lambda text: [ord(letter) for letter in text])
    return to_generation_requests(request, model="group", caller=CALLER, request_id="req", spell=spell, cut=cut)


PROMPTS: dict[str, tuple[Any, list[tuple[str | None, tuple[int, ...]]]]] = {
    "a text": ("Hi", [("Hi", ())]),
    "texts": (["a", "b"], [("a", ()), ("b", ())]),
    "token ids": ([104, 105], [(None, (104, 105))]),
    "lists of token ids": ([[104], [105, 106]], [(None, (104,)), (None, (105, 106))]),
    "special token ids": ([200006, 0, 201087], [(None, (200006, 0, 201087))]),
}


@pytest.mark.parametrize(("prompt", "raw"), PROMPTS.values(), ids=PROMPTS)
def test_every_prompt_form_is_accepted(prompt: Any, raw: Any) -> None:
    generations = generations_of(prompt=prompt)
    assert [(request.raw.text, request.raw.tokens) for request in generations.requests if request.raw] == raw


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no prompt": ({"prompt": None}, "prompt", "invalid_value"),
    "an empty text": ({"prompt": ""}, "prompt", "invalid_value"),
    "an empty list": ({"prompt": []}, "prompt", "invalid_value"),
    "an empty prompt among others": ({"prompt": ["a", ""]}, "prompt", "invalid_value"),
    "a token id too large": ({"prompt": [201088]}, "prompt", "invalid_value"),
    "a negative token id": ({"prompt": [[-1]]}, "prompt", "invalid_value"),
    "texts mixed with token ids": ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
    "a list of booleans": ({"prompt": [True]}, "prompt", "invalid_value"),
    "a lone surrogate": ({"prompt": "\ud800"}, "prompt", "invalid_value"),
    "max_tokens of zero": ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    "too many choices": ({"n": 129}, "n", "invalid_value"),
    "too many prompts times choices": ({"n": 65, "prompt": ["a", "b"]}, "prompt", "invalid_value"),
    "best_of": ({"best_of": 3}, "best_of", "unsupported_value"),
    "a suffix": ({"suffix": "end"}, "suffix", "unsupported_value"),
    "log probabilities": ({"logprobs": 21}, "logprobs", "invalid_value"),
    "log probabilities of the prompt": ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_value"),
    "beam search": ({"use_beam_search": True}, "use_beam_search", "unsupported_value"),
    "a response format": ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
    "a grammar": ({"guided_grammar": "root ::= x"}, "guided_grammar", "unsupported_value"),
    "a boolean for a number": ({"min_tokens": False}, "min_tokens", "unsupported_value"),
    "ignore_eos": ({"ignore_eos": True}, "ignore_eos", "unsupported_value"),
    "a temperature out of range": ({"temperature": 3}, "temperature", "invalid_value"),
    "a number as text": ({"max_tokens": "5"}, "max_tokens", "invalid_value"),
    "a stop token too large": ({"stop_token_ids": [201088]}, "stop_token_ids.0", "invalid_value"),
}


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED.values(), ids=REFUSED)
def test_an_unsupported_or_invalid_field_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises((ValidationError, UnisonoError)) as refused:
        generations_of(**fields)
    failure = failure_of(refused.value)
    assert (failure.status, failure.code == "unsupported_value") == (400, code == "unsupported_value")
    assert (failure.param or "").startswith(param)


NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "suffix": None,
    "logprobs": 0,
    "use_beam_search": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "response_format": {"type": "text"},
    "add_special_tokens": True,
    "user": "someone",
    "echo": False,
    "stop": None,
    "logit_bias": None,
}


@pytest.mark.parametrize("field", NEUTRAL)
def test_neutral_values_are_accepted_without_notes(field: str) -> None:
    assert generations_of(**{field: NEUTRAL[field]}).notes == ()


def test_fields_without_effect_are_noted() -> None:
    generations = generations_of(
        length_penalty=1.5, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    assert generations.notes == ("length_penalty: no effect", "stream_options.continuous_usage_stats: no effect")


def test_fields_reach_the_generation_request() -> None:
    [request] = generations_of(
        max_tokens=7, stop="end", seed=3, temperature=0.5, stop_token_ids=[200007], skip_special_tokens=False
    ).requests
    assert request.raw is not None
    assert (
        request.answer.max_tokens,
        request.answer.stop,
        request.answer.sampling.seed,
        request.answer.sampling.temperature,
    ) == (
        7,
        ("end",),
        3,
        0.5,
    )
    assert (request.raw.stop_tokens, request.raw.hides_special) == (frozenset({200007}), False)
    assert (request.origin.surface, request.prompt.fields.conversation, request.origin.tenant) == (
        "completions",
        "prompt",
        "team",
    )
    assert generations_of().requests[0].answer.max_tokens == 16


def test_every_choice_of_every_prompt_has_its_own_request() -> None:
    generations = generations_of(prompt=["a", "b"], n=2, seed=5, echo=True, best_of=2)
    assert [request.raw.text for request in generations.requests if request.raw] == ["a", "a", "b", "b"]
    assert [request.answer.sampling.seed for request in generations.requests] == [5, 6, 5, 6]
    assert [request.origin.request_id for request in generations.requests] == ["req", "req-1", "req-2", "req-3"]
    assert (generations.texts, generations.per_prompt) == (("a", "a", "b", "b"), 2)


def test_hooks_see_the_prompt_as_a_user_message() -> None:
    for prompt in ("hi", [104, 105]):
        [request] = generations_of(prompt=prompt).requests
        assert request.conversation.items == (UserMessage("hi"),)


def test_a_text_prompt_is_tokenized_if_token_ids_are_requested() -> None:
    [request] = generations_of(return_token_ids=True).requests
    assert request.raw is not None
    assert (request.raw.text, request.raw.tokens) == ("Hi", (72, 105))


PERMISSIONS = {
    (True, True): None,
    (True, False): "--raw",
    (False, True): "raw_completions",
    (False, False): "raw_compl",
}


@pytest.mark.parametrize(("switched_on", "raw"), PERMISSIONS)
def test_raw_completions_need_the_setting_and_a_permission(switched_on: bool, raw: bool) -> None:
    hint = PERMISSIONS[switched_on, raw]
    if hint is None:
        check_allowed(Caller("team", raw=raw), switched_on=switched_on)
        return
    with pytest.raises(NotAllowed) as refused:
        check_allowed(Caller("team", raw=raw), switched_on=switched_on)
    assert hint in refused.value.message
