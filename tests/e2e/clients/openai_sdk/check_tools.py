"""Tool calls: the loop an application runs, in every form the SDK has for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from openai_sdk.asking import ABOUT_PARIS, WEATHER, about, asked, call_of, folded, reasoning, scene
from pydantic import BaseModel, Field

ANSWER = "It is sunny in Paris with 18 degrees."
RESULT = "18 degrees, sunny"


def echo_tool() -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "echo", "description": "Repeats."}}


def not_strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {key: value for key, value in tool["function"].items() if key != "strict"}}


def completion_of(client: OpenAI, stream: bool, fields: dict[str, Any]) -> Any:
    answer: Any = client.chat.completions.create(**fields, stream=stream)
    return folded(answer) if stream else answer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_loop_to_the_final_answer(demo: OpenAI, stream: bool) -> None:
    asking = asked(ABOUT_PARIS, tools=[not_strict(WEATHER)])
    first = completion_of(demo, stream, asking)
    assert first.choices[0].finish_reason == "tool_calls"
    said = first.choices[0].message
    assert not said.content
    assert reasoning(said) == "We need the weather in Paris. Use get_weather."
    call = call_of(first)
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"location": "Paris"})

    # The message goes back as it came, extra fields included: that is how the SDK's documentation writes the loop.
    asking["messages"] += [said, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    second = completion_of(demo, stream, asking)
    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content == ANSWER
    assert about(second) if not stream else True


@pytest.mark.parametrize("with_reasoning", [False, True], ids=["reasoning dropped", "reasoning kept"])
def test_the_loop_with_plain_dictionaries(demo: OpenAI, with_reasoning: bool) -> None:
    asking = asked(ABOUT_PARIS, tools=[WEATHER])
    first = demo.chat.completions.create(**asking)
    said = first.choices[0].message.model_dump(exclude_none=True, include={"role", "tool_calls"})
    if with_reasoning:
        said["reasoning_content"] = reasoning(first.choices[0].message)
    asking["messages"] += [said, {"role": "tool", "tool_call_id": call_of(first).id, "content": RESULT}]
    second = demo.chat.completions.create(**asking)
    assert second.choices[0].message.content == ANSWER
    # The engine goes on from the very tokens it wrote.
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens


def test_a_streamed_call_is_the_whole_one_in_pieces(demo: OpenAI) -> None:
    asking = asked(ABOUT_PARIS, tools=[not_strict(WEATHER)])
    whole = demo.chat.completions.create(**asking)
    chunks = list(demo.chat.completions.create(**asking, stream=True, stream_options={"include_usage": True}))
    in_pieces = folded(chunks)

    deltas = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert [delta.index for delta in deltas] == [0] * len(deltas)
    assert deltas[0].id
    assert deltas[0].type == "function"
    assert deltas[0].function is not None
    assert (deltas[0].function.name, deltas[0].function.arguments) == ("get_weather", "")
    assert all(delta.id is None and delta.function and delta.function.name is None for delta in deltas[1:])

    assert call_of(in_pieces).function.name == call_of(whole).function.name
    assert call_of(in_pieces).function.arguments == call_of(whole).function.arguments
    assert call_of(in_pieces).id != call_of(whole).id
    assert in_pieces.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    assert reasoning(in_pieces.choices[0].message) == reasoning(whole.choices[0].message)
    assert in_pieces.usage is not None
    assert whole.usage is not None
    assert in_pieces.usage.completion_tokens == whole.usage.completion_tokens


def test_the_stream_helper_and_its_final_completion(demo: OpenAI) -> None:
    asking = asked(ABOUT_PARIS, tools=[WEATHER])
    kinds: list[str] = []
    arguments = ""
    with demo.chat.completions.stream(**asking) as stream:
        for event in stream:
            if not kinds or kinds[-1] != event.type:
                kinds.append(event.type)
            if event.type == "tool_calls.function.arguments.delta":
                arguments += event.arguments_delta
        final = stream.get_final_completion()
    assert [kind for kind in kinds if kind != "chunk"][-1] == "tool_calls.function.arguments.done"
    call = call_of(final)
    assert arguments == call.function.arguments
    assert call.function.parsed_arguments == {"location": "Paris"}
    assert final.choices[0].finish_reason == "tool_calls"

    asking["messages"] += [
        final.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": RESULT},
    ]
    text = ""
    with demo.chat.completions.stream(**asking, stream_options={"include_usage": True}) as stream:
        for event in stream:
            if event.type == "content.delta":
                text += event.delta
        final = stream.get_final_completion()
    assert text == ANSWER
    assert final.choices[0].message.content == ANSWER
    assert final.usage is not None
    assert final.usage.completion_tokens > 0


async def test_the_async_stream_helper(async_demo: AsyncOpenAI) -> None:
    async with async_demo.chat.completions.stream(**asked(ABOUT_PARIS, tools=[WEATHER])) as stream:
        final = await stream.get_final_completion()
    assert call_of(final).function.parsed_arguments == {"location": "Paris"}


class GetWeather(BaseModel):
    location: str = Field(description="City name")


def test_parse_gives_a_call_as_the_model_class_of_the_tool(scripted: OpenAI) -> None:
    tool = pydantic_function_tool(GetWeather, name="get_weather", description="Gets the current weather in a city.")
    parsed = scripted.chat.completions.parse(**scene("two calls", tools=[tool]))
    calls = parsed.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.parsed_arguments for call in calls] == [
        GetWeather(location="Paris"),
        GetWeather(location="Rome"),
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("allowed", "places"), [(None, ["Paris", "Rome"]), (True, ["Paris", "Rome"]), (False, ["Paris"])]
)
def test_parallel_calls_only_where_allowed(
    scripted: OpenAI, allowed: bool | None, places: list[str], stream: bool
) -> None:
    fields = scene("two calls", tools=[not_strict(WEATHER)])
    if allowed is not None:
        fields["parallel_tool_calls"] = allowed
    completion = completion_of(scripted, stream, fields)
    calls = completion.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["location"] for call in calls] == places
    assert len({call.id for call in calls}) == len(places)
    assert completion.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_parallel_tool_calls_false_on_a_real_engine(demo: OpenAI, stream: bool) -> None:
    asking = asked(ABOUT_PARIS, tools=[not_strict(WEATHER)], parallel_tool_calls=False)
    assert call_of(completion_of(demo, stream, asking)).function.name == "get_weather"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_call_that_was_cut_never_looks_like_a_call(scripted: OpenAI, stream: bool) -> None:
    completion = completion_of(scripted, stream, scene("a cut call", tools=[not_strict(WEATHER)]))
    assert completion.choices[0].finish_reason == "length"
    assert not completion.choices[0].message.tool_calls


def test_early_arguments_are_a_setting_of_the_model(scripted: OpenAI) -> None:
    def deltas(model: str) -> int:
        fields = scene("two calls, slowly", model=model, tools=[not_strict(WEATHER)])
        chunks = list(scripted.chat.completions.create(**fields, stream=True))
        calls = folded(chunks).choices[0].message.tool_calls or []
        arguments = [json.loads(call.function.arguments) for call in calls if call.type == "function"]
        assert arguments == [{"location": "Paris"}, {"location": "Rome"}]
        return sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks)

    assert deltas("scripted") == 4
    assert deltas("early") > 4


def test_a_custom_tool(scripted: OpenAI) -> None:
    completion = scripted.chat.completions.create(**scene("a custom call", tools=[echo_tool()]))
    call = call_of(completion)
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("echo", 'said "so"')


def test_tool_choice_none_gives_text(demo: OpenAI) -> None:
    completion = demo.chat.completions.create(**asked(ABOUT_PARIS, tools=[WEATHER], tool_choice="none"))
    assert completion.choices[0].message.tool_calls is None
    assert completion.choices[0].finish_reason == "stop"


def test_the_old_form_of_functions(scripted: OpenAI) -> None:
    function = not_strict(WEATHER)["function"]
    said = scripted.chat.completions.create(**scene("two calls", functions=[function])).choices[0]
    assert said.finish_reason == "function_call"
    assert said.message.function_call is not None
    assert said.message.function_call.name == "get_weather"
    assert json.loads(said.message.function_call.arguments) == {"location": "Paris"}
