"""Errors of the Responses API as SDK exceptions, and client disconnects."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai_sdk.failing import (
    BEFORE_THE_FIRST_WORD,
    BREAKING,
    FAILING,
    TOO_MANY_WORDS,
    check_beginning,
    check_failure,
    check_refusal,
)
from openai_sdk.responding import to_ask, to_play, watched

from conftest import Stage


def input_with_part(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Look:"}, fields]}]}


# Case: (fields, param, code).
INVALID: dict[str, tuple[dict[str, Any], str, str]] = {
    "a value out of range": ({"temperature": 9}, "temperature", "invalid_value"),
    "a value of the wrong type": ({"top_p": "much"}, "top_p", "invalid_value"),
    "max_output_tokens of zero": ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    "no input": ({"input": []}, "input", "invalid_value"),
    "an unknown role": ({"input": [{"role": "wizard", "content": "x"}]}, "input.0.role", "invalid_value"),
    "an unknown effort": ({"reasoning": {"effort": "galactic"}}, "reasoning.effort", "invalid_value"),
    "an image": (
        input_with_part(type="input_image", image_url="data:image/png;base64,AAAA", detail="auto"),
        "input.0.content.1.type",
        "unsupported_value",
    ),
    "a file": (input_with_part(type="input_file", file_id="file-1"), "input.0.content.1.file_id", "unsupported_value"),
    "too many log probabilities": ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    "a prompt template": ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_value"),
    "an unknown include": ({"include": ["everything"]}, "include", "invalid_value"),
    "a tool without a name": ({"tools": [{"type": "function", "parameters": {}}]}, "tools.0.name", "invalid_value"),
    "too many metadata entries": ({"metadata": {str(n): "x" for n in range(17)}}, "metadata", "invalid_value"),
    "input beyond the context": (
        {"model": "small", "input": TOO_MANY_WORDS},
        "input",
        "context_length_exceeded",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", INVALID)
def test_a_bad_request_names_its_field(scripted: OpenAI, name: str, stream: bool) -> None:
    fields, param, code = INVALID[name]
    check_refusal(lambda: scripted.responses.create(**{**to_play("an answer"), **fields}, stream=stream), param, code)


def test_long_input_is_truncated_with_truncation_auto(scripted: OpenAI) -> None:
    messages = [{"role": "user", "content": TOO_MANY_WORDS}, {"role": "user", "content": "script: an answer"}]
    response = scripted.responses.create(**to_ask(messages, model="small", truncation="auto"))
    assert response.output_text == "Here is the answer."
    assert response.usage is not None
    assert response.usage.input_tokens < 300


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_unknown_model_is_not_found(demo: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        demo.responses.create(**to_ask("Hello!", model="gpt-9"), stream=stream)
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


def test_a_wrong_key_is_rejected(stage: Stage, connect: Callable[..., OpenAI]) -> None:
    client = connect(f"{stage.scripted}/v1", api_key="sk-wrong")
    for call in (
        lambda: client.responses.create(**to_play("an answer")),
        lambda: client.responses.retrieve("resp_" + "0" * 32),
        client.conversations.create,
    ):
        with pytest.raises(openai.AuthenticationError) as raised:
            call()
        assert raised.value.code == "invalid_api_key"


@pytest.mark.parametrize("name", FAILING)
def test_a_backend_failure_raises_the_matching_exception(scripted: OpenAI, name: str) -> None:
    failure = FAILING[name]
    check_failure(lambda: scripted.responses.create(**failure.asked(to_play)), failure)


@pytest.mark.parametrize("name", BEFORE_THE_FIRST_WORD)
def test_a_stream_that_cannot_start_fails_with_a_status(scripted: OpenAI, name: str) -> None:
    failure = FAILING[name]
    with pytest.raises(openai.APIStatusError) as raised:
        scripted.responses.create(**failure.asked(to_play), stream=True)
    assert (raised.value.status_code, raised.value.code) == (failure.status, failure.code)


@pytest.mark.parametrize("name", BREAKING)
def test_a_broken_stream_ends_with_error_and_response_failed(scripted: OpenAI, name: str) -> None:
    events = watched(scripted, to_play(name, model="impatient"))
    *_, open_item, error, last = events
    assert open_item["type"] == "response.output_item.done"
    assert open_item["item"]["status"] == "incomplete"
    assert (error["type"], error["code"]) == ("error", BREAKING[name])
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    check_beginning(text)
    stored = scripted.responses.retrieve(last["response"]["id"])
    assert (stored.status, stored.output_text) == ("failed", text)


def test_an_sdk_retry_is_answered(stage: Stage, connect: Callable[..., OpenAI]) -> None:
    client = connect(f"{stage.scripted}/v1", api_key=stage.key, max_retries=1)
    raw = client.responses.with_raw_response.create(**to_play(f"fails once, respond {openai.__version__}"))
    assert raw.retries_taken == 1
    assert raw.parse().output_text == "Here is the answer."


def test_the_sdk_does_not_retry_a_conflict(stage: Stage, connect: Callable[..., OpenAI]) -> None:
    client = connect(f"{stage.scripted}/v1", api_key=stage.key, max_retries=2)
    key = {"Idempotency-Key": str(uuid.uuid4())}
    client.responses.create(**to_play("an answer", extra_headers=key))
    with pytest.raises(openai.ConflictError) as raised:
        client.responses.create(**to_play("two ends", extra_headers=key))
    assert raised.value.response.request.headers["x-stainless-retry-count"] == "0"


# A tenth of the duration of the slow script, whose backend has one slot.
RELEASE_TIMEOUT_S = 3.0


def slow() -> dict[str, Any]:
    return to_play("slow", model="one-at-a-time")


def check_slot_is_free(client: OpenAI) -> None:
    started = time.monotonic()
    response = client.responses.create(**to_play("an answer", model="one-at-a-time"))
    assert response.output_text == "Here is the answer."
    assert time.monotonic() - started < RELEASE_TIMEOUT_S


def test_closing_a_stream_frees_the_backend_and_stores_nothing(scripted: OpenAI) -> None:
    stream = scripted.responses.create(**slow(), stream=True)
    first = next(iter(stream))
    assert first.type == "response.created"
    stream.close()
    check_slot_is_free(scripted)
    with pytest.raises(openai.NotFoundError):
        scripted.responses.retrieve(first.response.id)


def test_leaving_the_stream_helper_frees_the_backend(scripted: OpenAI) -> None:
    with scripted.responses.stream(**slow()) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
    check_slot_is_free(scripted)


def test_a_client_timeout_frees_the_backend(scripted: OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        scripted.with_options(timeout=0.5).responses.create(**slow())
    check_slot_is_free(scripted)
