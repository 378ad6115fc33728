"""Agents of the OpenAI Agents SDK: loops, streams, handoffs, and every way it has to remember."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    RunResultStreaming,
    SQLiteSession,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from weather import ANSWER, HELLO, PARIS, SAID, Asked


class Weather(Asked):
    """A tool that remembers what it was asked."""

    def __init__(self, *answers: str) -> None:
        super().__init__(*answers)
        self.tool = function_tool(self.get_weather)


def agent_of(model: OpenAIResponsesModel, *tools: Any, **fields: Any) -> Agent[Any]:
    settings = fields.pop("settings", {})
    named = {"name": "asker", **fields}
    return Agent(model=model, tools=list(tools), model_settings=ModelSettings(temperature=0, **settings), **named)


async def heard(running: RunResultStreaming) -> tuple[list[Any], list[str]]:
    """The wire's events and the names of the items, as a stream tells them."""
    wire: list[Any] = []
    items: list[str] = []
    async for event in running.stream_events():
        if event.type == "raw_response_event":
            wire.append(event.data)
        elif event.type == "run_item_stream_event":
            items.append(event.name)
    return wire, items


async def streamed(agent: Agent[Any], given: str) -> RunResultStreaming:
    running = Runner.run_streamed(agent, given)
    await heard(running)
    return running


class Asked(BaseModel):
    """What an agent that is a tool is given: nothing."""


async def test_an_answer(demo: OpenAIResponsesModel) -> None:
    result = await Runner.run(agent_of(demo), "Hello!")
    assert result.final_output == HELLO
    assert [item.type for item in result.new_items] == ["reasoning_item", "message_output_item"]
    (response,) = result.raw_responses
    assert response.usage.requests == 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert (response.request_id or "").startswith("req_")


async def test_a_streamed_answer(demo: OpenAIResponsesModel) -> None:
    running = Runner.run_streamed(agent_of(demo), "Hello!")
    wire, items = await heard(running)
    assert running.final_output == HELLO
    assert "".join(event.delta for event in wire if event.type == "response.output_text.delta") == HELLO
    assert (wire[0].type, wire[-1].type) == ("response.created", "response.completed")
    assert items == ["reasoning_item_created", "message_output_created"]


# how turns of one run hang together: (arguments of a run, settings of the model)
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "everything is sent back": ({}, {}),
    "each answer names the one before": ({"auto_previous_response_id": True}, {}),
    "nothing is kept": ({}, {"store": False}),
    "nothing is kept and thoughts are sealed": (
        {},
        {"store": False, "response_include": ["reasoning.encrypted_content"]},
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_tool_loop(demo: OpenAIResponsesModel, way: str, stream: bool) -> None:
    how, settings = WAYS[way]
    weather = Weather()
    agent = agent_of(demo, weather.tool, settings=settings)
    if stream:
        result: Any = Runner.run_streamed(agent, PARIS, **how)
        _, items = await heard(result)
        assert items == [
            "reasoning_item_created", "tool_called", "tool_output", "reasoning_item_created", "message_output_created",
        ]  # fmt: skip
    else:
        result = await Runner.run(agent, PARIS, **how)
    assert (weather.asked, result.final_output) == (["Paris"], ANSWER)
    first, second = result.raw_responses
    # Whatever the way, the engine goes on from the tokens it wrote.
    if settings.get("store") is not False:
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 8


async def test_two_calls_in_turn(demo: OpenAIResponsesModel) -> None:
    weather = Weather("18 degrees, sunny", "11 degrees, rainy")
    result = await Runner.run(agent_of(demo, weather.tool), "Compare the weather in London and Tokyo.")
    assert (weather.asked, result.final_output) == (["London", "Tokyo"], "I compared London and Tokyo.")


async def test_calls_side_by_side(scripted: OpenAIResponsesModel) -> None:
    weather = Weather()
    result = await Runner.run(agent_of(scripted, weather.tool), "script: two calls, then: an answer")
    assert (sorted(weather.asked), result.final_output) == (["Paris", "Rome"], SAID)
    assert len(result.raw_responses) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("how", [{}, {"auto_previous_response_id": True}], ids=["all sent back", "by name"])
async def test_a_handoff(scripted: OpenAIResponsesModel, how: dict[str, Any], stream: bool) -> None:
    poet = agent_of(scripted, name="poet", instructions="Rhyme.")
    front = agent_of(scripted, instructions="Send poems on.", handoffs=[poet])
    asked = "script: a handoff, then: an answer"
    if stream:
        result: Any = Runner.run_streamed(front, asked, **how)
        _, items = await heard(result)
        assert items[1:3] == ["handoff_requested", "handoff_occured"]  # as the SDK spells it
    else:
        result = await Runner.run(front, asked, **how)
    assert (result.last_agent.name, result.final_output) == ("poet", SAID)


async def test_runs_are_chained_by_name(demo: OpenAIResponsesModel, async_demo: AsyncOpenAI) -> None:
    weather = Weather()
    first = await Runner.run(agent_of(demo, weather.tool), PARIS)
    second = await Runner.run(agent_of(demo, weather.tool), "ping", previous_response_id=first.last_response_id)
    assert first.last_response_id is not None
    assert second.last_response_id is not None
    kept = await async_demo.responses.retrieve(second.last_response_id)
    assert kept.previous_response_id == first.last_response_id
    (asked,) = [item async for item in async_demo.responses.input_items.list(kept.id)]
    assert asked.type == "message"


async def test_a_session_of_its_own_sends_everything_back(demo: OpenAIResponsesModel) -> None:
    session = SQLiteSession("s-1")
    weather = Weather()
    agent = agent_of(demo, weather.tool)
    first = await Runner.run(agent, PARIS, session=session)
    assert first.final_output == ANSWER
    second = await Runner.run(agent, "ping", session=session)
    kinds = [item.get("type", "message") for item in await session.get_items()]
    assert kinds[:7] == [
        "message", "reasoning", "function_call", "function_call_output", "reasoning", "message", "message",
    ]  # fmt: skip
    sent, sent_before = second.raw_responses[0].usage.input_tokens, first.raw_responses[0].usage.input_tokens
    assert sent > sent_before


async def test_a_session_the_gateway_keeps(demo: OpenAIResponsesModel, async_demo: AsyncOpenAI) -> None:
    session = OpenAIConversationsSession(openai_client=async_demo)
    weather = Weather()
    first = await Runner.run(agent_of(demo, weather.tool), PARIS, session=session)
    assert first.final_output == ANSWER
    running = Runner.run_streamed(agent_of(demo, weather.tool), "ping", session=session)
    await heard(running)
    kept = await session.get_items()
    kinds = [item.get("type") for item in kept]
    assert kinds[:7] == [
        "message", "reasoning", "function_call", "function_call_output", "reasoning", "message", "message",
    ]  # fmt: skip
    popped: Any = await session.pop_item()
    assert popped["role"] == "assistant"
    assert len(await session.get_items()) == len(kept) - 1
    await session.clear_session()


async def test_a_conversation_of_the_gateway(demo: OpenAIResponsesModel, async_demo: AsyncOpenAI) -> None:
    conversation = await async_demo.conversations.create()
    weather = Weather()
    result = await Runner.run(agent_of(demo, weather.tool), PARIS, conversation_id=conversation.id)
    assert (weather.asked, result.final_output) == (["Paris"], ANSWER)
    kinds = [item.type async for item in async_demo.conversations.items.list(conversation.id, order="asc")]
    assert kinds == ["message", "reasoning", "function_call", "function_call_output", "reasoning", "message"]


async def test_another_agent_as_a_tool(scripted: OpenAIResponsesModel) -> None:
    inner = agent_of(scripted, name="inner", instructions="Rhyme.")
    tool = inner.as_tool("transfer_to_poet", "Rhymes.", parameters=Asked, input_builder=lambda _: "script: an answer")
    result = await Runner.run(agent_of(scripted, tool), "script: a handoff, then: an answer")
    assert [item.output for item in result.new_items if item.type == "tool_call_output_item"] == [SAID]
    assert result.final_output == SAID


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_call_that_was_cut_is_never_made(scripted: OpenAIResponsesModel, stream: bool) -> None:
    weather = Weather()
    agent = agent_of(scripted, weather.tool)
    run = streamed if stream else Runner.run
    with pytest.raises(ModelBehaviorError, match="max_output_tokens"):
        await run(agent, "script: a cut call")
    assert weather.asked == []


async def test_a_model_that_only_calls_meets_the_limit_of_turns(scripted: OpenAIResponsesModel) -> None:
    weather = Weather()
    with pytest.raises(MaxTurnsExceeded):
        await Runner.run(agent_of(scripted, weather.tool), "script: two calls", max_turns=3)
    assert len(weather.asked) == 6


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_failing_backend_is_an_error_of_the_sdk(scripted: OpenAIResponsesModel, stream: bool) -> None:
    run = streamed if stream else Runner.run
    with pytest.raises(openai.InternalServerError) as raised:
        await run(agent_of(scripted), "script: broken")
    assert raised.value.code == "backend_error"
