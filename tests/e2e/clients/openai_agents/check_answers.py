"""Structured output and forced tools of agents."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from agents import Agent, ModelRefusalError, ModelSettings, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
from pydantic import BaseModel


class Place(BaseModel):
    """Where something is."""

    country: Literal["France", "Japan"]
    capital: bool


def make_agent(model: OpenAIResponsesModel, *tools: Any, choice: str | None = None, **fields: Any) -> Agent[Any]:
    settings = ModelSettings(temperature=0, tool_choice=choice)
    return Agent(name="asker", model=model, tools=list(tools), model_settings=settings, **fields)


async def test_structured_output_is_parsed_into_the_output_type(demo: OpenAIResponsesModel) -> None:
    result = await Runner.run(make_agent(demo, output_type=Place), "Hello!")
    assert isinstance(result.final_output, Place)


async def test_streamed_structured_output_is_parsed(demo: OpenAIResponsesModel) -> None:
    running = Runner.run_streamed(make_agent(demo, output_type=Place), "Hello!")
    async for _ in running.stream_events():
        pass
    assert isinstance(running.final_output, Place)


@pytest.mark.parametrize("choice", ["required", "look_up"])
async def test_a_forced_tool_is_called_once(demo: OpenAIResponsesModel, choice: str) -> None:
    countries: list[str] = []

    @function_tool
    def look_up(country: Literal["France", "Japan"]) -> str:
        """Looks a country up.

        Args:
            country: Its name
        """
        countries.append(country)
        return "18 degrees, sunny"

    result = await Runner.run(make_agent(demo, look_up, choice=choice, output_type=Place), "Hello!", max_turns=3)
    assert len(countries) == 1
    assert isinstance(result.final_output, Place)


async def test_a_refusal_raises_an_error(async_scripted: AsyncOpenAI) -> None:
    free = OpenAIResponsesModel("free", async_scripted)
    with pytest.raises(ModelRefusalError, match="I would rather not"):
        await Runner.run(make_agent(free, output_type=Place), "script: no JSON", max_turns=1)
