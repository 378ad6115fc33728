"""Structured output by each of LangChain's methods, and refusals."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from langchain_openai import ChatOpenAI
from langchain_openai.chat_models.base import OpenAIRefusalError
from pydantic import BaseModel, Field

REFUSAL = "I would rather not."
# The library reuses connections across models.
ON_SESSION_LOOP = pytest.mark.asyncio(loop_scope="session")
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
def test_structured_output_is_parsed_into_the_model_class(
    demo: Any, method: Any, strict: bool, on_responses: bool
) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    place = model.with_structured_output(Place, method=method, strict=strict).invoke("Hello!")
    assert isinstance(place, Place)


@pytest.mark.parametrize("method", METHODS)
def test_a_json_schema_yields_a_dictionary(demo: Any, method: Any, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    place = model.with_structured_output(SCHEMA, method=method).invoke("Hello!")
    assert isinstance(place, dict)
    assert place["country"] in ("France", "Japan")
    assert isinstance(place["capital"], bool)


@pytest.mark.parametrize("method", METHODS)
def test_include_raw_returns_the_message_and_the_result(demo: Any, method: Any, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    output = model.with_structured_output(Place, method=method, include_raw=True).invoke("Hello!")
    assert isinstance(output, dict)
    assert isinstance(output["parsed"], Place)
    assert output["parsing_error"] is None
    assert bool(output["raw"].tool_calls) is (method == "function_calling")
    assert output["raw"].usage_metadata["output_tokens"] > 0


# The library stores the parsed object in a field that its own type declares as None.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
@pytest.mark.parametrize("method", METHODS)
def test_streamed_structured_output_is_parsed(demo: Any, method: Any, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    *_, last = model.with_structured_output(Place, method=method).stream("Hello!")
    assert isinstance(last, Place)


@ON_SESSION_LOOP
async def test_structured_output_works_asynchronously(demo: Any, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    assert isinstance(await model.with_structured_output(Place).ainvoke("Hello!"), Place)


def test_json_mode_yields_an_object(demo: Any, on_responses: bool) -> None:
    model: ChatOpenAI = demo(use_responses_api=on_responses, max_tokens=400)
    output = model.with_structured_output(None, method="json_mode").invoke("Hello!")
    assert isinstance(output, dict)


def test_json_mode_output_is_validated_by_the_library(demo: Any) -> None:
    model: ChatOpenAI = demo(max_tokens=400)
    output = model.with_structured_output(Place, method="json_mode", include_raw=True).invoke("Hello!")
    assert isinstance(output, dict)
    assert isinstance(json.loads(output["raw"].text), dict)
    assert output["parsed"] is None
    assert output["parsing_error"] is not None


def test_tools_can_be_called_before_the_structured_output(scripted: Any, on_responses: bool) -> None:
    def get_weather(location: str) -> str:
        """Gets the weather."""
        return location

    model: ChatOpenAI = scripted(use_responses_api=on_responses)
    structured = model.with_structured_output(
        Place, method="json_schema", include_raw=True, tools=[get_weather], strict=True
    )
    output = structured.invoke("script: two calls")
    assert isinstance(output, dict)
    assert [call["name"] for call in output["raw"].tool_calls] == ["get_weather"] * 2
    assert output["parsed"] is None


def test_a_refusal_raises_an_error(scripted: Any, on_responses: bool) -> None:
    model: ChatOpenAI = scripted("free", use_responses_api=on_responses)
    with pytest.raises(OpenAIRefusalError, match=REFUSAL):
        model.with_structured_output(Place, method="json_schema").invoke("script: no JSON")
