"""Tool calls over Chat Completions: the tool loop, streams, parsing and helpers of the SDK."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from openai_sdk.asking import (
    PARIS_QUESTION,
    WEATHER,
    chat_request,
    fold_chunks,
    only_call,
    reasoning_of,
    scripted_request,
    unisono_fields,
)
from pydantic import BaseModel, Field

ANSWER = "It is sunny in Paris with 18 degrees."
RESULT = "18 degrees, sunny"


def echo_tool() -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "echo", "description": "Repeats."}}


def not_strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {key: value for key, value in tool["function"].items() if key != "strict"}}


def create_completion(client: OpenAI, stream: bool, fields: dict[str, Any]) -> Any:
    answer: Any = client.chat.completions.create(**fields, stream=stream)
    return fold_chunks(answer) if stream else answer


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "stream"])
def test_the_tool_loop_reaches_the_final_answer(demo: OpenAI, stream: bool) -> None:
    request = chat_request(PARIS_QUESTION, tools=[not_strict(WEATHER)])
    first = create_completion(demo, stream, request)
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    assert not message.content
    assert reasoning_of(message) == "We need the weather in Paris. Use get_weather."
    call = only_call(first)
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"location": "Paris"})

    # The message is sent back unchanged with its extra fields, as in the SDK's documentation.
    request["messages"] += [message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    second = create_completion(demo, stream, request)
    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content == ANSWER
    if not stream:
        # The SDK drops additional fields when it folds a stream.
        assert unisono_fields(second)["recoveries"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "with_reasoning",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["without reasoning", "with reasoning"],
)
def test_the_tool_loop_works_with_plain_dictionaries(demo: OpenAI, with_reasoning: bool) -> None:
    request = chat_request(PARIS_QUESTION, tools=[WEATHER])
    first = demo.chat.completions.create(**request)
    message = first.choices[0].message.model_dump(exclude_none=True, include={"role", "tool_calls"})
    if with_reasoning:
        message["reasoning_content"] = reasoning_of(first.choices[0].message)
    request["messages"] += [message, {"role": "tool", "tool_call_id": only_call(first).id, "content": RESULT}]
    second = demo.chat.completions.create(**request)
    assert second.choices[0].message.content == ANSWER
    # The engine continues from the tokens that it generated.
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens


@pytest.mark.slow
def test_a_streamed_call_matches_the_whole_call(demo: OpenAI) -> None:
    request = chat_request(PARIS_QUESTION, tools=[not_strict(WEATHER)])
    whole = demo.chat.completions.create(**request)
    chunks = list(demo.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    streamed = fold_chunks(chunks)

    deltas = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert [delta.index for delta in deltas] == [0] * len(deltas)
    assert deltas[0].id
    assert deltas[0].type == "function"
    assert deltas[0].function is not None
    assert (deltas[0].function.name, deltas[0].function.arguments) == ("get_weather", "")
    assert all(delta.id is None and delta.function and delta.function.name is None for delta in deltas[1:])

    assert only_call(streamed).function.name == only_call(whole).function.name
    assert only_call(streamed).function.arguments == only_call(whole).function.arguments
    assert only_call(streamed).id != only_call(whole).id
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    assert reasoning_of(streamed.choices[0].message) == reasoning_of(whole.choices[0].message)
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.slow
def test_the_stream_helper_returns_the_final_completion(demo: OpenAI) -> None:
    request = chat_request(PARIS_QUESTION, tools=[WEATHER])
    kinds: list[str] = []
    arguments = ""
    with demo.chat.completions.stream(**request) as stream:
        for event in stream:
            if not kinds or kinds[-1] != event.type:
                kinds.append(event.type)
            if event.type == "tool_calls.function.arguments.delta":
                arguments += event.arguments_delta
        final = stream.get_final_completion()
    assert [kind for kind in kinds if kind != "chunk"][-1] == "tool_calls.function.arguments.done"
    call = only_call(final)
    assert arguments == call.function.arguments
    assert call.function.parsed_arguments == {"location": "Paris"}
    assert final.choices[0].finish_reason == "tool_calls"

    request["messages"] += [
        final.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": RESULT},
    ]
    text = ""
    with demo.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        for event in stream:
            if event.type == "content.delta":
                text += event.delta
        final = stream.get_final_completion()
    assert text == ANSWER
    assert final.choices[0].message.content == ANSWER
    assert final.usage is not None
    assert final.usage.completion_tokens > 0


@pytest.mark.slow
async def test_the_async_stream_helper_parses_arguments(async_demo: AsyncOpenAI) -> None:
    async with async_demo.chat.completions.stream(**chat_request(PARIS_QUESTION, tools=[WEATHER])) as stream:
        final = await stream.get_final_completion()
    assert only_call(final).function.parsed_arguments == {"location": "Paris"}


class GetWeather(BaseModel):
    location: str = Field(description="City name")


def test_parse_returns_arguments_as_the_model_class(scripted: OpenAI) -> None:
    tool = pydantic_function_tool(GetWeather, name="get_weather", description="Gets the current weather in a city.")
    parsed = scripted.chat.completions.parse(**scripted_request("two calls", tools=[tool]))
    calls = parsed.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.parsed_arguments for call in calls] == [
        GetWeather(location="Paris"),
        GetWeather(location="Rome"),
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("allowed", "locations"), [(None, ["Paris", "Rome"]), (True, ["Paris", "Rome"]), (False, ["Paris"])]
)
def test_parallel_calls_are_limited_by_parallel_tool_calls(
    scripted: OpenAI, allowed: bool | None, locations: list[str], stream: bool
) -> None:
    fields = scripted_request("two calls", tools=[not_strict(WEATHER)])
    if allowed is not None:
        fields["parallel_tool_calls"] = allowed
    completion = create_completion(scripted, stream, fields)
    calls = completion.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["location"] for call in calls] == locations
    assert len({call.id for call in calls}) == len(locations)
    assert completion.choices[0].finish_reason == "tool_calls"


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_parallel_tool_calls_false_works_on_a_real_engine(demo: OpenAI, stream: bool) -> None:
    request = chat_request(PARIS_QUESTION, tools=[not_strict(WEATHER)], parallel_tool_calls=False)
    assert only_call(create_completion(demo, stream, request)).function.name == "get_weather"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_truncated_call_is_not_emitted(scripted: OpenAI, stream: bool) -> None:
    completion = create_completion(scripted, stream, scripted_request("a cut call", tools=[not_strict(WEATHER)]))
    assert completion.choices[0].finish_reason == "length"
    assert not completion.choices[0].message.tool_calls


def test_a_model_setting_enables_early_arguments(scripted: OpenAI) -> None:
    def deltas(model: str) -> int:
        fields = scripted_request("two calls, slowly", model=model, tools=[not_strict(WEATHER)])
        chunks = list(scripted.chat.completions.create(**fields, stream=True))
        calls = fold_chunks(chunks).choices[0].message.tool_calls or []
        arguments = [json.loads(call.function.arguments) for call in calls if call.type == "function"]
        assert arguments == [{"location": "Paris"}, {"location": "Rome"}]
        return sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks)

    assert deltas("scripted") == 4
    assert deltas("early") > 4


def test_a_custom_tool_receives_plain_text(scripted: OpenAI) -> None:
    completion = scripted.chat.completions.create(**scripted_request("a custom call", tools=[echo_tool()]))
    call = only_call(completion)
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("echo", 'said "so"')


@pytest.mark.slow
def test_tool_choice_none_gives_text(demo: OpenAI) -> None:
    completion = demo.chat.completions.create(**chat_request(PARIS_QUESTION, tools=[WEATHER], tool_choice="none"))
    assert completion.choices[0].message.tool_calls is None
    assert completion.choices[0].finish_reason == "stop"


def test_the_legacy_functions_field_is_supported(scripted: OpenAI) -> None:
    function = not_strict(WEATHER)["function"]
    choice = scripted.chat.completions.create(**scripted_request("two calls", functions=[function])).choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.function_call is not None
    assert choice.message.function_call.name == "get_weather"
    assert json.loads(choice.message.function_call.arguments) == {"location": "Paris"}
