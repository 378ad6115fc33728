"""Raw completions through OpenAI's own client: prompts in every form, whole and streamed, and what it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from conftest import Stage

PROMPT = "<|start|>user<|message|>script: an answer<|end|><|start|>assistant"
SAID = (
    "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>Here is the answer."
)
ASKED: dict[str, Any] = {"model": "scripted", "max_tokens": 100, "extra_body": {"skip_special_tokens": False}}


def test_a_prompt_is_completed(scripted: openai.OpenAI) -> None:
    completion = scripted.completions.create(prompt=PROMPT, **ASKED)
    [choice] = completion.choices
    assert (choice.text, choice.finish_reason, completion.object) == (SAID, "stop", "text_completion")
    assert completion.usage is not None
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens


def test_prompts_of_ids_are_completed_one_by_one(scripted: openai.OpenAI) -> None:
    told = scripted.completions.create(prompt=PROMPT, **{**ASKED, "extra_body": {"return_token_ids": True}})
    ids = (told.choices[0].model_extra or {})["prompt_token_ids"]
    completion = scripted.completions.create(prompt=[ids, ids], n=2, **ASKED)
    assert [(choice.index, choice.text) for choice in completion.choices] == [(at, SAID) for at in range(4)]


def test_a_stream_is_the_same(stage: Stage, connect: Callable[..., openai.OpenAI]) -> None:
    # OpenAI's own chunks have no finish reason before the last one, which the SDK's types know nothing of.
    client = connect(f"{stage.scripted}/v1", api_key=stage.key, _strict_response_validation=False)
    chunks = list(
        client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **ASKED)
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == SAID
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


def test_what_is_not_had_raises(scripted: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        scripted.completions.create(prompt=PROMPT, logprobs=2, **ASKED)
    assert refused.value.param == "logprobs"


def test_where_it_is_off_it_says_how_to_switch_it_on(demo: openai.OpenAI) -> None:
    with pytest.raises(openai.PermissionDeniedError) as refused:
        demo.completions.create(model="gpt-oss-demo", prompt="Hi")
    assert "raw_completions" in str(refused.value)
