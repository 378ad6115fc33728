"""Agents over the Messages API: LangChain's ChatAnthropic and Pydantic AI's AnthropicModel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from anthropic import AsyncAnthropic
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from pydantic_ai import Agent, WebSearchTool
from pydantic_ai.capabilities import NativeTool
from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
from pydantic_ai.providers.anthropic import AnthropicProvider
from weather import ANSWER, HELLO, PARIS, SAID, Asked

if TYPE_CHECKING:
    from conftest import Stage

THINKING: dict[str, Any] = {"type": "enabled", "budget_tokens": 1024}


def langchain_model(stage: Stage, **fields: Any) -> ChatAnthropic:
    return ChatAnthropic(
        model="gpt-oss-demo",
        base_url=stage.demo,
        api_key="unused",
        max_tokens=2000,
        max_retries=0,
        temperature=None if "thinking" in fields else 0,
        **fields,
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_langchain_reports_text_stop_reason_and_usage(stage: Stage, stream: bool) -> None:
    model = langchain_model(stage, streaming=stream)
    message = model.invoke("Hello")
    assert message.text == HELLO
    assert message.response_metadata["stop_reason"] == "end_turn"
    usage = message.usage_metadata
    assert usage is not None
    assert usage["output_tokens"] == model.invoke("Hello").usage_metadata["output_tokens"]  # type: ignore[index]
    assert 0 < usage["input_tokens"] < 200


@pytest.mark.parametrize("thinking", [None, THINKING], ids=["without thinking", "with thinking"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_langchain_completes_the_tool_loop(stage: Stage, stream: bool, thinking: Any) -> None:
    weather = Asked()
    fields = {} if thinking is None else {"thinking": thinking}
    model = langchain_model(stage, streaming=stream, **fields).bind_tools([weather.get_weather])
    messages: list[Any] = [HumanMessage(PARIS)]
    first = model.invoke(messages)
    [call] = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"location": "Paris"})
    messages += [first, ToolMessage(weather.get_weather(**call["args"]), tool_call_id=call["id"])]
    assert model.invoke(messages).text == ANSWER


@pytest.mark.parametrize("thinking", [None, THINKING], ids=["without thinking", "with thinking"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_pydantic_ai_completes_the_tool_loop(
    stage: Stage, usual: dict[str, Any], stream: bool, thinking: Any
) -> None:
    weather = Asked()
    settings = AnthropicModelSettings(max_tokens=2000)
    if thinking is not None:
        settings["anthropic_thinking"] = thinking
    async with AsyncAnthropic(base_url=stage.demo, **usual) as client:
        model = AnthropicModel("gpt-oss-demo", provider=AnthropicProvider(anthropic_client=client))
        agent = Agent(model, tools=[weather.get_weather], model_settings=settings)
        if stream:
            async with agent.run_stream(PARIS) as running:
                output = await running.get_output()
                usage = running.usage
        else:
            run = await agent.run(PARIS)
            output, usage = run.output, run.usage
    assert output == ANSWER
    assert weather.asked == ["Paris"]
    assert usage is not None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_pydantic_ai_continues_after_pause_turn(stage: Stage, usual: dict[str, Any], stream: bool) -> None:
    async with AsyncAnthropic(base_url=stage.scripted, **{**usual, "api_key": stage.key}) as client:
        model = AnthropicModel("scripted", provider=AnthropicProvider(anthropic_client=client))
        agent = Agent(model, capabilities=[NativeTool(WebSearchTool())])
        prompt = "script: a search, then: a page, then: an answer"
        if stream:
            async with agent.run_stream(prompt) as running:
                output = await running.get_output()
        else:
            output = (await agent.run(prompt)).output
    assert output == SAID
