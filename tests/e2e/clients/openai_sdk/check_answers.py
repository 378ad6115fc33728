"""Answers as they were asked for: what the SDK parses, tools that have to be called, and refusals where neither is had.

The demo's engine is kept to a schema; the backend behind `free` cannot be.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from openai import OpenAI, pydantic_function_tool
from openai_sdk.asking import WEATHER, about, asked, call_of, folded, scene
from pydantic import BaseModel

NAMED = {"type": "function", "function": {"name": "get_weather"}}
SORRY = "I would rather not."


class Place(BaseModel):
    """Where something is."""

    country: Literal["France", "Japan"]
    capital: bool


class Trip(BaseModel):
    """From somewhere to somewhere."""

    origin: Place
    stop: Place | None
    kind: Literal["short", "long"]


class Lookup(BaseModel):
    """Looks a place up."""

    country: Literal["France", "Japan"]


def to_ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "gpt-oss-demo", "input": text, "temperature": 0, **fields}


@pytest.mark.parametrize("form", [Place, Trip], ids=lambda form: form.__name__)
def test_chat_is_parsed(demo: OpenAI, form: type[BaseModel]) -> None:
    completion = demo.chat.completions.parse(**asked("Hello!", max_tokens=400), response_format=form)
    message = completion.choices[0].message
    assert message.refusal is None
    assert isinstance(message.parsed, form)
    assert "unmet" not in about(completion)


def test_a_chat_stream_is_parsed(demo: OpenAI) -> None:
    with demo.chat.completions.stream(**asked("Hello!", max_tokens=400), response_format=Place) as stream:
        kinds = {event.type for event in stream}
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Place)
    assert {"content.delta", "content.done"} <= kinds


@pytest.mark.parametrize("form", [Place, Trip], ids=lambda form: form.__name__)
def test_a_response_is_parsed(demo: OpenAI, form: type[BaseModel]) -> None:
    response = demo.responses.parse(**to_ask("Hello!", max_output_tokens=400), text_format=form)
    assert isinstance(response.output_parsed, form)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    assert response.text.format.schema_ == demo.responses.retrieve(response.id).text.format.schema_  # type: ignore[union-attr]


def test_a_response_stream_is_parsed(demo: OpenAI) -> None:
    with demo.responses.stream(**to_ask("Hello!", max_output_tokens=400), text_format=Place) as stream:
        kinds = {event.type for event in stream}
        parsed = stream.get_final_response().output_parsed
    assert isinstance(parsed, Place)
    assert "response.output_text.delta" in kinds


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chat_calls_what_it_has_to(demo: OpenAI, choice: Any, stream: bool) -> None:
    answer: Any = demo.chat.completions.create(
        **asked("Hello!", tools=[WEATHER], tool_choice=choice, max_tokens=200), stream=stream
    )
    call = call_of(folded(answer) if stream else answer)
    assert call.function.name == "get_weather"
    assert list(json.loads(call.function.arguments)) == ["location"]


@pytest.mark.parametrize("choice", [{"type": "function", "name": "get_weather"}, "required"], ids=["named", "required"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_response_calls_what_it_has_to(demo: OpenAI, choice: Any, stream: bool) -> None:
    fields = to_ask("Hello!", tools=[{"type": "function", **WEATHER["function"]}], tool_choice=choice)
    answer: Any = demo.responses.create(**fields, max_output_tokens=200, stream=stream)
    response = list(answer)[-1].response if stream else answer
    [call] = [item for item in response.output if item.type == "function_call"]
    assert list(json.loads(call.arguments)) == ["location"]
    repeated = response.tool_choice
    assert (repeated if isinstance(repeated, str) else repeated.model_dump()) == choice


def test_arguments_are_parsed(demo: OpenAI) -> None:
    fields = asked("Hello!", tools=[pydantic_function_tool(Lookup)], tool_choice="required", max_tokens=100)
    completion = demo.chat.completions.parse(**fields)
    assert isinstance(call_of(completion).function.parsed_arguments, Lookup)


def test_what_is_no_json_is_a_refusal_that_is_not_parsed(scripted: OpenAI) -> None:
    completion = scripted.chat.completions.parse(**scene("no JSON", model="free"), response_format=Place)
    message = completion.choices[0].message
    assert (message.parsed, message.content, message.refusal) == (None, None, SORRY)
    assert about(completion)["unmet"]


def test_a_streamed_refusal_is_not_parsed(scripted: OpenAI) -> None:
    with scripted.chat.completions.stream(**scene("no JSON", model="free"), response_format=Place) as stream:
        told = [event for event in stream if event.type == "refusal.done"]
        message = stream.get_final_completion().choices[0].message
    assert [event.refusal for event in told] == [SORRY]
    assert (message.parsed, message.refusal) == (None, SORRY)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_response_that_refuses_is_not_parsed(scripted: OpenAI, stream: bool) -> None:
    fields = {"model": "free", "input": "script: no JSON"}
    if stream:
        with scripted.responses.stream(**fields, text_format=Place) as told:
            kinds = {event.type for event in told}
            response = told.get_final_response()
        assert {"response.refusal.delta", "response.refusal.done"} <= kinds
    else:
        response = scripted.responses.parse(**fields, text_format=Place)
    assert response.output_parsed is None
    [message] = [item for item in response.output if item.type == "message"]
    assert [part.model_dump() for part in message.content] == [{"type": "refusal", "refusal": SORRY}]
