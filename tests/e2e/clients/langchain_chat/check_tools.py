"""Tools that LangChain binds: chosen, forced, forbidden, called at once and one at a time, whole and streamed."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

BOTH_FORMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@tool
def get_weather(location: str) -> str:
    """Gets the weather of a place."""
    return f"18 degrees in {location}"


@tool
def look_up(country: Literal["France", "Japan"]) -> str:
    """Looks a country up."""
    return country


def said(model: Any, given: Any, stream: bool) -> AIMessage:
    """The message; of a stream, all of its chunks as one."""
    if not stream:
        message = model.invoke(given)
        assert isinstance(message, AIMessage)
        return message
    chunks = list(model.stream(given))
    whole: AIMessageChunk = sum(chunks[1:], start=chunks[0])
    return whole


FORCED: dict[str, Any] = {
    "by its name": "look_up",
    "any": "any",
    "in full": {"type": "function", "function": {"name": "look_up"}},
}


@BOTH_FORMS
@pytest.mark.parametrize("choice", FORCED.values(), ids=FORCED)
def test_a_tool_is_called_that_the_model_would_not_call(
    demo: Any, choice: Any, stream: bool, on_responses: bool
) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    message = said(model.bind_tools([look_up], tool_choice=choice), "Hello!", stream)
    [call] = message.tool_calls
    assert call["name"] == "look_up"
    assert call["args"]["country"] in ("France", "Japan")
    assert message.invalid_tool_calls == []


@pytest.mark.parametrize("choice", ["look_up", "get_weather"])
def test_of_several_tools_the_one_that_is_named_is_called(demo: Any, choice: str, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    message = said(model.bind_tools([get_weather, look_up], tool_choice=choice, strict=True), "Hello!", True)
    assert [call["name"] for call in message.tool_calls] == [choice]


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_a_tool_that_may_be_left_alone_is(demo: Any, choice: Any, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    message = said(model.bind_tools([look_up], tool_choice=choice), "Hello!", False)
    assert message.tool_calls == []
    assert message.text


def test_nothing_is_called_where_nothing_may_be(scripted: Any, on_responses: bool) -> None:
    model: ChatOpenAI = scripted(use_responses_api=on_responses)
    message = said(model.bind_tools([get_weather], tool_choice="none"), "script: two calls", False)
    assert message.tool_calls == []


@BOTH_FORMS
@pytest.mark.parametrize(
    ("parallel", "places"), [(None, ["Paris", "Rome"]), (True, ["Paris", "Rome"]), (False, ["Paris"])]
)
def test_calls_come_at_once_or_one_at_a_time(
    scripted: Any, parallel: bool | None, places: list[str], stream: bool, on_responses: bool
) -> None:
    model: ChatOpenAI = scripted(use_responses_api=on_responses)
    bound = model.bind_tools([get_weather], parallel_tool_calls=parallel)
    message = said(bound, "script: two calls", stream)
    assert [call["args"]["location"] for call in message.tool_calls] == places
    assert len({call["id"] for call in message.tool_calls}) == len(places)


def test_a_loop_of_tools_comes_to_its_answer(scripted: Any, on_responses: bool) -> None:
    model = scripted(use_responses_api=on_responses).bind_tools([get_weather], tool_choice="any")
    talk: list[Any] = [HumanMessage("script: two calls, then: an answer")]
    message = model.invoke(talk)
    talk += [message, *(get_weather.invoke(call) for call in message.tool_calls)]
    assert all(isinstance(each, ToolMessage) for each in talk[2:])
    answer = scripted(use_responses_api=on_responses).bind_tools([get_weather]).invoke(talk)
    assert answer.text == "Here is the answer."


def test_a_call_is_streamed_as_what_it_is(scripted: Any, on_responses: bool) -> None:
    model = scripted("early", use_responses_api=on_responses).bind_tools([get_weather])
    parts = [part for chunk in model.stream("script: two calls") for part in chunk.tool_call_chunks]
    assert [part["name"] for part in parts if part["name"]] == ["get_weather", "get_weather"]
    assert len({part["index"] for part in parts}) == 2
    assert "".join(part["args"] or "" for part in parts) == '{"location":"Paris"}{"location":"Rome"}'
