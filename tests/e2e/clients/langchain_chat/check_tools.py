"""Tool calls through LangChain: forced, forbidden and parallel, whole and streamed."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

WHOLE_AND_STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@tool
def get_weather(location: str) -> str:
    """Gets the weather of a place."""
    return f"18 degrees in {location}"


@tool
def look_up(country: Literal["France", "Japan"]) -> str:
    """Looks a country up."""
    return country


def ask(model: Any, prompt: Any, stream: bool) -> AIMessage:
    """Return the message; for a stream, the sum of its chunks."""
    if not stream:
        message = model.invoke(prompt)
        assert isinstance(message, AIMessage)
        return message
    chunks = list(model.stream(prompt))
    whole: AIMessageChunk = sum(chunks[1:], start=chunks[0])
    return whole


FORCED: dict[str, Any] = {
    "by name": "look_up",
    "any": "any",
    "as an object": {"type": "function", "function": {"name": "look_up"}},
}


@WHOLE_AND_STREAMED
@pytest.mark.parametrize("choice", FORCED.values(), ids=FORCED)
def test_tool_choice_forces_a_call(demo: Any, choice: Any, stream: bool, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    message = ask(model.bind_tools([look_up], tool_choice=choice), "Hello!", stream)
    [call] = message.tool_calls
    assert call["name"] == "look_up"
    assert call["args"]["country"] in ("France", "Japan")
    assert message.invalid_tool_calls == []


@pytest.mark.parametrize("choice", ["look_up", "get_weather"])
def test_tool_choice_selects_one_of_several_tools(demo: Any, choice: str, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    message = ask(model.bind_tools([get_weather, look_up], tool_choice=choice, strict=True), "Hello!", True)
    assert [call["name"] for call in message.tool_calls] == [choice]


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_tool_choice_none_or_auto_allows_a_text_answer(demo: Any, choice: Any, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    message = ask(model.bind_tools([look_up], tool_choice=choice), "Hello!", False)
    assert message.tool_calls == []
    assert message.text


def test_tool_choice_none_suppresses_generated_calls(scripted: Any, on_responses: bool) -> None:
    model: ChatOpenAI = scripted(use_responses_api=on_responses)
    message = ask(model.bind_tools([get_weather], tool_choice="none"), "script: two calls", False)
    assert message.tool_calls == []


@WHOLE_AND_STREAMED
@pytest.mark.parametrize(
    ("parallel", "locations"), [(None, ["Paris", "Rome"]), (True, ["Paris", "Rome"]), (False, ["Paris"])]
)
def test_parallel_tool_calls_limits_the_number_of_calls(
    scripted: Any, parallel: bool | None, locations: list[str], stream: bool, on_responses: bool
) -> None:
    model: ChatOpenAI = scripted(use_responses_api=on_responses)
    bound = model.bind_tools([get_weather], parallel_tool_calls=parallel)
    message = ask(bound, "script: two calls", stream)
    assert [call["args"]["location"] for call in message.tool_calls] == locations
    assert len({call["id"] for call in message.tool_calls}) == len(locations)


def test_the_tool_loop_reaches_the_final_answer(scripted: Any, on_responses: bool) -> None:
    model = scripted(use_responses_api=on_responses).bind_tools([get_weather], tool_choice="any")
    messages: list[Any] = [HumanMessage("script: two calls, then: an answer")]
    message = model.invoke(messages)
    messages += [message, *(get_weather.invoke(call) for call in message.tool_calls)]
    assert all(isinstance(each, ToolMessage) for each in messages[2:])
    answer = scripted(use_responses_api=on_responses).bind_tools([get_weather]).invoke(messages)
    assert answer.text == "Here is the answer."


def test_streamed_call_chunks_have_names_indexes_and_arguments(scripted: Any, on_responses: bool) -> None:
    model = scripted("early", use_responses_api=on_responses).bind_tools([get_weather])
    call_chunks = [call_chunk for chunk in model.stream("script: two calls") for call_chunk in chunk.tool_call_chunks]
    assert [call_chunk["name"] for call_chunk in call_chunks if call_chunk["name"]] == ["get_weather", "get_weather"]
    assert len({call_chunk["index"] for call_chunk in call_chunks}) == 2
    assert "".join(call_chunk["args"] or "" for call_chunk in call_chunks) == '{"location":"Paris"}{"location":"Rome"}'
