"""LiteLLM's proxy with the documented configuration, through the OpenAI SDK."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

ANSWER = "Here is the answer: naïve 日本."
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
    },
}


@pytest.fixture
def client(proxy: tuple[str, str]) -> Any:
    url, key = proxy
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as client:
        yield client


def chat_request(script: str, **fields: Any) -> dict[str, Any]:
    return {"model": "gpt-oss-20b", "messages": [{"role": "user", "content": f"script: {script}"}], **fields}


def test_a_whole_answer_has_reasoning_and_usage(client: openai.OpenAI, backend: Any) -> None:
    completion = client.chat.completions.create(**chat_request("an answer", reasoning_effort="high"))
    message = completion.choices[0].message
    assert message.content == ANSWER
    assert (message.model_extra or {})["reasoning_content"] == "Let me see."
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 23
    assert "Reasoning: high" in backend.prompts[-1]


def test_a_streamed_answer_has_reasoning_and_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **chat_request("an answer")
    )
    chunks = list(stream)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    assert "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas) == "Let me see."
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 23


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tool_choice_required_forces_a_call(client: openai.OpenAI, stream: bool) -> None:
    request = chat_request("an answer", tools=[WEATHER], tool_choice="required")
    if stream:
        deltas = [c.delta for chunk in client.chat.completions.create(stream=True, **request) for c in chunk.choices]
        calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
        name = "".join(call.name or "" for call in calls if call is not None)
        arguments = "".join(call.arguments or "" for call in calls if call is not None)
    else:
        [call] = client.chat.completions.create(**request).choices[0].message.tool_calls or ()
        assert call.type == "function"
        name, arguments = call.function.name, call.function.arguments
    assert name == "get_weather"
    assert isinstance(json.loads(arguments), dict)


def test_an_unsupported_field_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**chat_request("an answer", logprobs=True, top_logprobs=99))
