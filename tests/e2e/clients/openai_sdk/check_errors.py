"""Errors of Chat Completions as SDK exceptions, with status, code, field and message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk
from openai_sdk.asking import chat_request, scripted_request
from openai_sdk.failing import (
    BEFORE_THE_FIRST_WORD,
    BREAKING,
    FAILING,
    TOO_MANY_WORDS,
    check_beginning,
    check_failure,
    check_refusal,
)

from conftest import Stage


def message_with_part(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look:"}, fields]}]}


CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
UNKNOWN_CALL = {"role": "tool", "tool_call_id": "call_of_somebody_else", "content": "42"}

# Case: (fields, param, code).
INVALID: dict[str, tuple[dict[str, Any], str, str]] = {
    "a value out of range": ({"temperature": 9}, "temperature", "invalid_value"),
    "a value of the wrong type": ({"top_p": "much"}, "top_p", "invalid_value"),
    "max_tokens of zero": ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    "no messages": ({"messages": []}, "messages", "invalid_value"),
    "an unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "invalid_value"),
    "an unknown effort": ({"reasoning_effort": "galactic"}, "reasoning_effort", "invalid_value"),
    "an image": (
        message_with_part(type="image_url", image_url={"url": "data:image/png;base64,AAAA"}),
        "messages.0.content.1.type",
        "unsupported_value",
    ),
    "audio input": (
        message_with_part(type="input_audio", input_audio={"data": "AAAA", "format": "wav"}),
        "messages.0.content.1.type",
        "unsupported_value",
    ),
    "a file": (
        message_with_part(type="file", file={"file_id": "file-1"}),
        "messages.0.content.1.file.file_id",
        "unsupported_value",
    ),
    "audio output": (
        {"modalities": ["text", "audio"], "audio": {"voice": "ash", "format": "wav"}},
        "modalities",
        "unsupported_value",
    ),
    "too many log probabilities": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    "a tool result of another call": (
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}, UNKNOWN_CALL]},
        "messages.1.tool_call_id",
        "invalid_value",
    ),
    "a tool without a name": (
        {"tools": [{"type": "function", "function": {"parameters": {}}}]},
        "tools.0.function.name",
        "invalid_value",
    ),
    "a prompt beyond the context": (
        {"model": "small", "messages": [{"role": "user", "content": TOO_MANY_WORDS}]},
        "messages",
        "context_length_exceeded",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", INVALID)
def test_a_bad_request_names_its_field(scripted: OpenAI, name: str, stream: bool) -> None:
    fields, param, code = INVALID[name]
    check_refusal(
        lambda: scripted.chat.completions.create(**scripted_request("an answer", **fields), stream=stream), param, code
    )


def test_a_neutral_value_of_an_unsupported_field_is_accepted(scripted: OpenAI) -> None:
    neutral = {"logprobs": False, "modalities": ["text"], "n": 1, "audio": None, "stop": None, "tools": None}
    completion = scripted.chat.completions.create(**scripted_request("an answer", **neutral))
    assert completion.choices[0].message.content == "Here is the answer."


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_unknown_model_is_not_found(demo: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        demo.chat.completions.create(**chat_request("Hello!", model="gpt-9"), stream=stream)
    assert (raised.value.status_code, raised.value.code, raised.value.param) == (404, "model_not_found", "model")
    assert "gpt-9" in str(raised.value)


def test_retrieving_an_unknown_model_is_not_found(demo: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        demo.models.retrieve("gpt-9")
    assert raised.value.code == "model_not_found"


def test_a_model_name_may_contain_a_slash(scripted: OpenAI) -> None:
    assert scripted.models.retrieve("openai/gpt-oss-20b").id == "openai/gpt-oss-20b"
    completion = scripted.chat.completions.create(**scripted_request("an answer", model="openai/gpt-oss-20b"))
    assert completion.model == "openai/gpt-oss-20b"


def test_an_unsupported_endpoint_is_not_found(demo: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        demo.files.list()
    assert raised.value.code == "not_found"


def test_a_model_of_another_mode_is_a_bad_request(demo: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        demo.embeddings.create(model="gpt-oss-demo", input="Hello!")
    assert raised.value.param == "model"


@pytest.mark.parametrize("key", ["sk-wrong", "sk-the-only-key-and-more", "-"])
def test_a_wrong_key_is_rejected(stage: Stage, connect: Callable[..., OpenAI], key: str) -> None:
    client = connect(f"{stage.scripted}/v1", api_key="sk-wrong", default_headers={"Authorization": f"Bearer {key}"})
    for call in (lambda: client.chat.completions.create(**scripted_request("an answer")), client.models.list):
        with pytest.raises(openai.AuthenticationError) as raised:
            call()
        assert (raised.value.status_code, raised.value.code) == (401, "invalid_api_key")
        assert "sk-the-only-key" not in str(raised.value)


def test_a_gateway_without_keys_denies_cross_origin_requests(demo: OpenAI) -> None:
    with pytest.raises(openai.PermissionDeniedError) as raised:
        demo.chat.completions.create(**chat_request("Hello!"), extra_headers={"Origin": "https://evil.example"})
    assert (raised.value.status_code, raised.value.code) == (403, "permission_denied")


def test_an_oversized_body_is_rejected(scripted: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        scripted.chat.completions.create(**chat_request("x y " * 500_000, model="scripted"))
    assert (raised.value.status_code, raised.value.code) == (413, "body_too_large")
    # The connection is closed, and the client opens another one.
    assert scripted.chat.completions.create(**scripted_request("an answer")).choices[0].finish_reason == "stop"


@pytest.mark.parametrize("name", FAILING)
def test_a_backend_failure_raises_the_matching_exception(scripted: OpenAI, name: str) -> None:
    failure = FAILING[name]
    check_failure(lambda: scripted.chat.completions.create(**failure.asked(scripted_request)), failure)


@pytest.mark.parametrize("name", BEFORE_THE_FIRST_WORD)
def test_a_stream_that_cannot_start_fails_with_a_status(scripted: OpenAI, name: str) -> None:
    failure = FAILING[name]
    with pytest.raises(openai.APIStatusError) as raised:
        scripted.chat.completions.create(**failure.asked(scripted_request), stream=True)
    assert (raised.value.status_code, raised.value.code) == (failure.status, failure.code)


def test_retry_after_of_a_busy_backend_is_forwarded(scripted: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        scripted.chat.completions.create(**scripted_request("busy"))
    assert raised.value.response.headers["retry-after"] == "7"


@pytest.mark.parametrize("name", BREAKING)
def test_a_broken_stream_raises_after_its_chunks(scripted: OpenAI, name: str) -> None:
    stream = scripted.chat.completions.create(**scripted_request(name, model="impatient"), stream=True)
    chunks: list[ChatCompletionChunk] = []
    with pytest.raises(openai.APIError) as raised:
        chunks.extend(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    check_beginning(text)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * len(chunks)
    assert type(raised.value) is openai.APIError
    assert raised.value.code == BREAKING[name]
    assert raised.value.type == "server_error"


def test_an_sdk_retry_is_answered(stage: Stage, connect: Callable[..., OpenAI]) -> None:
    client = connect(f"{stage.scripted}/v1", api_key=stage.key, max_retries=1)
    raw = client.chat.completions.with_raw_response.create(**scripted_request(f"fails once {openai.__version__}"))
    assert raw.retries_taken == 1
    assert raw.parse().choices[0].message.content == "Here is the answer."
