"""Structured output, forced tools and refusals through the OpenAI SDK.

The engine of the demo model enforces schemas; the backend of the model `free` cannot.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from openai import OpenAI, pydantic_function_tool
from openai_sdk.asking import WEATHER, chat_request, fold_chunks, only_call, scripted_request, unisono_fields
from pydantic import BaseModel

NAMED_CHOICE = {"type": "function", "function": {"name": "get_weather"}}
REFUSAL = "I would rather not."


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


def response_request(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "gpt-oss-demo", "input": text, "temperature": 0, **fields}


@pytest.mark.slow
@pytest.mark.parametrize("form", [Place, Trip], ids=lambda form: form.__name__)
def test_a_chat_completion_is_parsed(demo: OpenAI, form: type[BaseModel]) -> None:
    completion = demo.chat.completions.parse(**chat_request("Hello!", max_tokens=400), response_format=form)
    message = completion.choices[0].message
    assert message.refusal is None
    assert isinstance(message.parsed, form)
    assert "unmet" not in unisono_fields(completion)


@pytest.mark.slow
def test_a_chat_stream_is_parsed(demo: OpenAI) -> None:
    with demo.chat.completions.stream(**chat_request("Hello!", max_tokens=400), response_format=Place) as stream:
        kinds = {event.type for event in stream}
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Place)
    assert {"content.delta", "content.done"} <= kinds


@pytest.mark.parametrize("form", [Place, pytest.param(Trip, marks=pytest.mark.slow)], ids=lambda form: form.__name__)
def test_a_response_is_parsed(demo: OpenAI, form: type[BaseModel]) -> None:
    response = demo.responses.parse(**response_request("Hello!", max_output_tokens=400), text_format=form)
    assert isinstance(response.output_parsed, form)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    assert response.text.format.schema_ == demo.responses.retrieve(response.id).text.format.schema_  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_response_stream_is_parsed(demo: OpenAI) -> None:
    with demo.responses.stream(**response_request("Hello!", max_output_tokens=400), text_format=Place) as stream:
        kinds = {event.type for event in stream}
        parsed = stream.get_final_response().output_parsed
    assert isinstance(parsed, Place)
    assert "response.output_text.delta" in kinds


@pytest.mark.slow
@pytest.mark.parametrize("choice", [NAMED_CHOICE, "required"], ids=["named", "required"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chat_calls_a_forced_tool(demo: OpenAI, choice: Any, stream: bool) -> None:
    answer: Any = demo.chat.completions.create(
        **chat_request("Hello!", tools=[WEATHER], tool_choice=choice, max_tokens=200), stream=stream
    )
    call = only_call(fold_chunks(answer) if stream else answer)
    assert call.function.name == "get_weather"
    assert list(json.loads(call.function.arguments)) == ["location"]


@pytest.mark.slow
@pytest.mark.parametrize("choice", [{"type": "function", "name": "get_weather"}, "required"], ids=["named", "required"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_response_calls_a_forced_tool(demo: OpenAI, choice: Any, stream: bool) -> None:
    fields = response_request("Hello!", tools=[{"type": "function", **WEATHER["function"]}], tool_choice=choice)
    answer: Any = demo.responses.create(**fields, max_output_tokens=200, stream=stream)
    response = list(answer)[-1].response if stream else answer
    [call] = [item for item in response.output if item.type == "function_call"]
    assert list(json.loads(call.arguments)) == ["location"]
    echoed = response.tool_choice
    assert (echoed if isinstance(echoed, str) else echoed.model_dump()) == choice


@pytest.mark.slow
def test_call_arguments_are_parsed(demo: OpenAI) -> None:
    fields = chat_request("Hello!", tools=[pydantic_function_tool(Lookup)], tool_choice="required", max_tokens=100)
    completion = demo.chat.completions.parse(**fields)
    assert isinstance(only_call(completion).function.parsed_arguments, Lookup)


@pytest.mark.slow
def test_non_json_output_is_an_unparsed_refusal(scripted: OpenAI) -> None:
    completion = scripted.chat.completions.parse(**scripted_request("no JSON", model="free"), response_format=Place)
    message = completion.choices[0].message
    assert (message.parsed, message.content, message.refusal) == (None, None, REFUSAL)
    assert unisono_fields(completion)["unmet"]


@pytest.mark.slow
def test_a_streamed_refusal_is_not_parsed(scripted: OpenAI) -> None:
    with scripted.chat.completions.stream(**scripted_request("no JSON", model="free"), response_format=Place) as stream:
        refusals = [event for event in stream if event.type == "refusal.done"]
        message = stream.get_final_completion().choices[0].message
    assert [event.refusal for event in refusals] == [REFUSAL]
    assert (message.parsed, message.refusal) == (None, REFUSAL)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_refusal_in_a_response_is_not_parsed(scripted: OpenAI, stream: bool) -> None:
    fields = {"model": "free", "input": "script: no JSON"}
    if stream:
        with scripted.responses.stream(**fields, text_format=Place) as streaming:
            kinds = {event.type for event in streaming}
            response = streaming.get_final_response()
        assert {"response.refusal.delta", "response.refusal.done"} <= kinds
    else:
        response = scripted.responses.parse(**fields, text_format=Place)
    assert response.output_parsed is None
    [message] = [item for item in response.output if item.type == "message"]
    assert [part.model_dump() for part in message.content] == [{"type": "refusal", "refusal": REFUSAL}]
