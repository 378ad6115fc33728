"""Structured results of Pydantic AI: native JSON schema, output tool, and the default mode."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.settings import ModelSettings


class Place(BaseModel):
    """Facts about a place."""

    country: Literal["France", "Japan"]
    capital: bool


OUTPUTS: dict[str, Any] = {
    "native": NativeOutput(Place),
    "tool": ToolOutput(Place),
    "default": Place,
}


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
async def test_result_has_the_output_type(demo: OpenAIResponsesModel, output: Any) -> None:
    agent: Agent[None, Place] = Agent(demo, output_type=output, model_settings=ModelSettings(temperature=0))
    result = await agent.run("Hello!")
    assert isinstance(result.output, Place)
    assert result.usage.requests == 1


async def test_streamed_result_has_the_output_type(demo: OpenAIResponsesModel) -> None:
    agent: Agent[None, Place] = Agent(demo, output_type=NativeOutput(Place))
    async with agent.run_stream("Hello!", model_settings=ModelSettings(temperature=0)) as result:
        assert isinstance(await result.get_output(), Place)


async def test_refusal_raises_unexpected_model_behavior(scripted: OpenAIResponsesModel) -> None:
    free = OpenAIResponsesModel("free", provider=scripted._provider)
    agent: Agent[None, Place] = Agent(free, output_type=NativeOutput(Place), retries=0)
    with pytest.raises(UnexpectedModelBehavior):
        await agent.run("script: no JSON")
