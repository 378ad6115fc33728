"""Raw completions through the OpenAI SDK: prompt forms, streams and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from conftest import Stage

PROMPT = "<|start|>user<|message|>script: an answer<|end|><|start|>assistant"
OUTPUT = (
    "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>Here is the answer."
)
REQUEST: dict[str, Any] = {"model": "scripted", "max_tokens": 100, "extra_body": {"skip_special_tokens": False}}


def test_a_prompt_is_completed(scripted: openai.OpenAI) -> None:
    completion = scripted.completions.create(prompt=PROMPT, **REQUEST)
    [choice] = completion.choices
    assert (choice.text, choice.finish_reason, completion.object) == (OUTPUT, "stop", "text_completion")
    assert completion.usage is not None
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens


def test_token_id_prompts_with_n_return_indexed_choices(scripted: openai.OpenAI) -> None:
    first = scripted.completions.create(prompt=PROMPT, **{**REQUEST, "extra_body": {"return_token_ids": True}})
    ids = (first.choices[0].model_extra or {})["prompt_token_ids"]
    completion = scripted.completions.create(prompt=[ids, ids], n=2, **REQUEST)
    assert [(choice.index, choice.text) for choice in completion.choices] == [(index, OUTPUT) for index in range(4)]


def test_a_stream_has_the_same_text_and_usage(stage: Stage, connect: Callable[..., openai.OpenAI]) -> None:
    # Chunks before the last have no finish reason, as at OpenAI, but the SDK's types require one.
    client = connect(f"{stage.scripted}/v1", api_key=stage.key, _strict_response_validation=False)
    chunks = list(
        client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **REQUEST)
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == OUTPUT
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


def test_an_unsupported_field_is_rejected(scripted: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.completions.create(prompt=PROMPT, suffix="the end", **REQUEST)
    assert raised.value.param == "suffix"


def test_the_error_for_disabled_raw_completions_names_the_setting(demo: openai.OpenAI) -> None:
    with pytest.raises(openai.PermissionDeniedError) as raised:
        demo.completions.create(model="gpt-oss-demo", prompt="Hi")
    assert "raw_completions" in str(raised.value)
