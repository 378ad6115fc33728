"""Structured output in each of the ways that LangChain knows, and what it does with a refusal."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from langchain_openai import ChatOpenAI
from langchain_openai.chat_models.base import OpenAIRefusalError
from pydantic import BaseModel, Field

SORRY = "I would rather not."
ON_ONE_LOOP = pytest.mark.asyncio(loop_scope="session")
"""The library keeps its connections from one model to the next."""
METHODS = ("json_schema", "function_calling")


class Place(BaseModel):
    """Where something is."""

    country: Literal["France", "Japan"] = Field(description="The country.")
    capital: bool = Field(description="Whether it is the capital.")


SCHEMA: dict[str, Any] = {
    "title": "Place",
    "description": "Where something is.",
    "type": "object",
    "properties": {"country": {"enum": ["France", "Japan"]}, "capital": {"type": "boolean"}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("strict", [False, True], ids=["loose", "strict"])
@pytest.mark.parametrize("method", METHODS)
def test_a_result_is_of_its_type(demo: Any, method: Any, strict: bool, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    place = model.with_structured_output(Place, method=method, strict=strict).invoke("Hello!")
    assert isinstance(place, Place)


@pytest.mark.parametrize("method", METHODS)
def test_a_result_of_a_plain_schema_is_a_dictionary(demo: Any, method: Any, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    place = model.with_structured_output(SCHEMA, method=method).invoke("Hello!")
    assert isinstance(place, dict)
    assert place["country"] in ("France", "Japan")
    assert isinstance(place["capital"], bool)


@pytest.mark.parametrize("method", METHODS)
def test_what_came_can_be_had_beside_the_result(demo: Any, method: Any, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    both = model.with_structured_output(Place, method=method, include_raw=True).invoke("Hello!")
    assert isinstance(both, dict)
    assert isinstance(both["parsed"], Place)
    assert both["parsing_error"] is None
    assert bool(both["raw"].tool_calls) is (method == "function_calling")
    assert both["raw"].usage_metadata["output_tokens"] > 0


# The library puts what was parsed where its own type says that there is nothing.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
@pytest.mark.parametrize("method", METHODS)
def test_a_streamed_result_is_of_its_type(demo: Any, method: Any, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    *_, last = model.with_structured_output(Place, method=method).stream("Hello!")
    assert isinstance(last, Place)


@ON_ONE_LOOP
async def test_a_result_can_be_waited_for(demo: Any, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    assert isinstance(await model.with_structured_output(Place).ainvoke("Hello!"), Place)


def test_json_without_a_schema_is_some_object(demo: Any, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    some = model.with_structured_output(None, method="json_mode").invoke("Hello!")
    assert isinstance(some, dict)


def test_json_of_no_schema_is_checked_by_the_library(demo: Any) -> None:
    model: ChatOpenAI = demo(max_tokens=400)
    both = model.with_structured_output(Place, method="json_mode", include_raw=True).invoke("Hello!")
    assert isinstance(both, dict)
    assert isinstance(json.loads(both["raw"].text), dict)
    assert both["parsed"] is None
    assert both["parsing_error"] is not None


def test_tools_may_be_called_before_the_result(scripted: Any, on_responses: bool) -> None:
    def get_weather(location: str) -> str:
        """Gets the weather."""
        return location

    model: ChatOpenAI = scripted(use_responses_api=on_responses)
    structured = model.with_structured_output(
        Place, method="json_schema", include_raw=True, tools=[get_weather], strict=True
    )
    both = structured.invoke("script: two calls")
    assert isinstance(both, dict)
    assert [call["name"] for call in both["raw"].tool_calls] == ["get_weather"] * 2
    assert both["parsed"] is None


def test_a_refusal_is_no_result(scripted: Any, on_responses: bool) -> None:
    model: ChatOpenAI = scripted("free", use_responses_api=on_responses)
    with pytest.raises(OpenAIRefusalError, match=SORRY):
        model.with_structured_output(Place, method="json_schema").invoke("script: no JSON")
