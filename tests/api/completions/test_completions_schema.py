"""What a raw completion may ask for: honoured, noted, or refused by the name of its field."""

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


def turns_of(**fields: Any) -> CompletionGenerations:
    request = CompletionRequest.model_validate({"model": "gpt-oss", "prompt": "Hi", **fields})
    spell, cut = (lambda ids: "".join(map(chr, ids))), (lambda text: [ord(letter) for letter in text])
    return to_generation_requests(request, model="group", caller=CALLER, request_id="req", spell=spell, cut=cut)


PROMPTS: dict[str, tuple[Any, list[tuple[str | None, tuple[int, ...]]]]] = {
    "a text": ("Hi", [("Hi", ())]),
    "texts": (["a", "b"], [("a", ()), ("b", ())]),
    "ids": ([104, 105], [(None, (104, 105))]),
    "lists of ids": ([[104], [105, 106]], [(None, (104,)), (None, (105, 106))]),
    "special ids": ([200006, 0, 201087], [(None, (200006, 0, 201087))]),
}


@pytest.mark.parametrize(("prompt", "raw"), PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_is_taken_in_every_form(prompt: Any, raw: Any) -> None:
    asked = turns_of(prompt=prompt)
    assert [(turn.raw.text, turn.raw.tokens) for turn in asked.requests if turn.raw] == raw


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no prompt": ({"prompt": None}, "prompt", "invalid_value"),
    "an empty text": ({"prompt": ""}, "prompt", "invalid_value"),
    "an empty list": ({"prompt": []}, "prompt", "invalid_value"),
    "an empty prompt among others": ({"prompt": ["a", ""]}, "prompt", "invalid_value"),
    "an id too large": ({"prompt": [201088]}, "prompt", "invalid_value"),
    "a negative id": ({"prompt": [[-1]]}, "prompt", "invalid_value"),
    "texts and ids": ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
    "truths": ({"prompt": [True]}, "prompt", "invalid_value"),
    "a lone surrogate": ({"prompt": "\ud800"}, "prompt", "invalid_value"),
    "no tokens at all": ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    "too many choices": ({"n": 129}, "n", "invalid_value"),
    "too many prompts times choices": ({"n": 65, "prompt": ["a", "b"]}, "prompt", "invalid_value"),
    "the best of several": ({"best_of": 3}, "best_of", "unsupported_value"),
    "a suffix": ({"suffix": "end"}, "suffix", "unsupported_value"),
    "log probabilities": ({"logprobs": 2}, "logprobs", "unsupported_value"),
    "those of the prompt": ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_value"),
    "beams": ({"use_beam_search": True}, "use_beam_search", "unsupported_value"),
    "a form": ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
    "a grammar": ({"guided_grammar": "root ::= x"}, "guided_grammar", "unsupported_value"),
    "a truth for a number": ({"min_tokens": False}, "min_tokens", "unsupported_value"),
    "no end": ({"ignore_eos": True}, "ignore_eos", "unsupported_value"),
    "an odd temperature": ({"temperature": 3}, "temperature", "invalid_value"),
    "a number as text": ({"max_tokens": "5"}, "max_tokens", "invalid_value"),
    "a stop token too large": ({"stop_token_ids": [201088]}, "stop_token_ids.0", "invalid_value"),
}


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises((ValidationError, UnisonoError)) as refused:
        turns_of(**fields)
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
def test_what_asks_for_nothing_is_taken_without_a_word(field: str) -> None:
    assert turns_of(**{field: NEUTRAL[field]}).notes == ()


def test_what_is_without_effect_is_noted() -> None:
    asked = turns_of(length_penalty=1.5, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert asked.notes == ("length_penalty: no effect", "stream_options.continuous_usage_stats: no effect")


def test_fields_are_honoured() -> None:
    [turn] = turns_of(
        max_tokens=7, stop="end", seed=3, temperature=0.5, stop_token_ids=[200007], skip_special_tokens=False
    ).requests
    assert turn.raw is not None
    assert (turn.max_tokens, turn.stop, turn.sampling.seed, turn.sampling.temperature) == (7, ("end",), 3, 0.5)
    assert (turn.raw.stop_tokens, turn.raw.hides_special) == (frozenset({200007}), False)
    assert (turn.surface, turn.fields.conversation, turn.tenant) == ("completions", "prompt", "team")
    assert turns_of().requests[0].max_tokens == 16


def test_choices_of_all_prompts_have_a_turn_each() -> None:
    asked = turns_of(prompt=["a", "b"], n=2, seed=5, echo=True, best_of=2)
    assert [turn.raw.text for turn in asked.requests if turn.raw] == ["a", "a", "b", "b"]
    assert [turn.sampling.seed for turn in asked.requests] == [5, 4, 5, 4]
    assert [turn.request_id for turn in asked.requests] == ["req", "req-1", "req-2", "req-3"]
    assert (asked.texts, asked.per_prompt) == (("a", "a", "b", "b"), 2)


def test_hooks_find_the_prompt_as_a_message_of_the_users() -> None:
    for prompt in ("hi", [104, 105]):
        [turn] = turns_of(prompt=prompt).requests
        assert turn.conversation.items == (UserMessage("hi"),)


def test_ids_of_a_text_are_known_where_they_are_told() -> None:
    [turn] = turns_of(return_token_ids=True).requests
    assert turn.raw is not None
    assert (turn.raw.text, turn.raw.tokens) == ("Hi", (72, 105))


PERMITTED = {(True, True): None, (True, False): "--raw", (False, True): "raw_completions", (False, False): "raw_compl"}


@pytest.mark.parametrize(("switched_on", "raw"), PERMITTED)
def test_it_takes_the_setting_and_a_permission(switched_on: bool, raw: bool) -> None:
    says = PERMITTED[switched_on, raw]
    if says is None:
        check_allowed(Caller("team", raw=raw), switched_on=switched_on)
        return
    with pytest.raises(NotAllowed) as refused:
        check_allowed(Caller("team", raw=raw), switched_on=switched_on)
    assert says in refused.value.message
