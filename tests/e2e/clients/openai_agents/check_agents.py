"""Agents of the OpenAI Agents SDK: tool loops, streams, handoffs and sessions."""

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
    """Weather tool that records the locations of its calls."""

    def __init__(self, *answers: str) -> None:
        super().__init__(*answers)
        self.tool = function_tool(self.get_weather)


def make_agent(model: OpenAIResponsesModel, *tools: Any, **fields: Any) -> Agent[Any]:
    settings = fields.pop("settings", {})
    agent_fields = {"name": "asker", **fields}
    return Agent(
        model=model, tools=list(tools), model_settings=ModelSettings(temperature=0, **settings), **agent_fields
    )


async def read_stream(running: RunResultStreaming) -> tuple[list[Any], list[str]]:
    """Return the raw response events and the names of the run items of a stream."""
    events: list[Any] = []
    items: list[str] = []
    async for event in running.stream_events():
        if event.type == "raw_response_event":
            events.append(event.data)
        elif event.type == "run_item_stream_event":
            items.append(event.name)
    return events, items


async def run_streamed(agent: Agent[Any], prompt: str) -> RunResultStreaming:
    running = Runner.run_streamed(agent, prompt)
    await read_stream(running)
    return running


class NoArguments(BaseModel):
    """Arguments of an agent that is used as a tool: none."""


async def test_an_answer_has_items_and_usage(demo: OpenAIResponsesModel) -> None:
    result = await Runner.run(make_agent(demo), "Hello!")
    assert result.final_output == HELLO
    assert [item.type for item in result.new_items] == ["reasoning_item", "message_output_item"]
    (response,) = result.raw_responses
    assert response.usage.requests == 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert (response.request_id or "").startswith("req_")


async def test_a_streamed_answer_has_events_and_items(demo: OpenAIResponsesModel) -> None:
    running = Runner.run_streamed(make_agent(demo), "Hello!")
    events, items = await read_stream(running)
    assert running.final_output == HELLO
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == HELLO
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert items == ["reasoning_item_created", "message_output_created"]


# How the turns of a run are linked: (options of the run, settings of the model).
HISTORY_MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all items sent back": ({}, {}),
    "previous_response_id": ({"auto_previous_response_id": True}, {}),
    "not stored": ({}, {"store": False}),
    "not stored, encrypted reasoning": (
        {},
        {"store": False, "response_include": ["reasoning.encrypted_content"]},
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("mode", HISTORY_MODES)
async def test_the_tool_loop_reaches_the_final_answer(demo: OpenAIResponsesModel, mode: str, stream: bool) -> None:
    options, settings = HISTORY_MODES[mode]
    weather = Weather()
    agent = make_agent(demo, weather.tool, settings=settings)
    if stream:
        result: Any = Runner.run_streamed(agent, PARIS, **options)
        _, items = await read_stream(result)
        assert items == [
            "reasoning_item_created", "tool_called", "tool_output", "reasoning_item_created", "message_output_created",
        ]  # fmt: skip
    else:
        result = await Runner.run(agent, PARIS, **options)
    assert (weather.asked, result.final_output) == (["Paris"], ANSWER)
    first, second = result.raw_responses
    # With stored responses, the engine continues from the tokens that it generated.
    if settings.get("store") is not False:
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 8


async def test_sequential_calls_are_executed(demo: OpenAIResponsesModel) -> None:
    weather = Weather("18 degrees, sunny", "11 degrees, rainy")
    result = await Runner.run(make_agent(demo, weather.tool), "Compare the weather in London and Tokyo.")
    assert (weather.asked, result.final_output) == (["London", "Tokyo"], "I compared London and Tokyo.")


async def test_parallel_calls_are_executed(scripted: OpenAIResponsesModel) -> None:
    weather = Weather()
    result = await Runner.run(make_agent(scripted, weather.tool), "script: two calls, then: an answer")
    assert (sorted(weather.asked), result.final_output) == (["Paris", "Rome"], SAID)
    assert len(result.raw_responses) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "options", [{}, {"auto_previous_response_id": True}], ids=["all items sent back", "previous_response_id"]
)
async def test_a_handoff_runs_the_other_agent(
    scripted: OpenAIResponsesModel, options: dict[str, Any], stream: bool
) -> None:
    poet = make_agent(scripted, name="poet", instructions="Rhyme.")
    front = make_agent(scripted, instructions="Send poems on.", handoffs=[poet])
    prompt = "script: a handoff, then: an answer"
    if stream:
        result: Any = Runner.run_streamed(front, prompt, **options)
        _, items = await read_stream(result)
        assert items[1:3] == ["handoff_requested", "handoff_occured"]  # spelled as in the SDK
    else:
        result = await Runner.run(front, prompt, **options)
    assert (result.last_agent.name, result.final_output) == ("poet", SAID)


async def test_runs_are_chained_by_previous_response_id(demo: OpenAIResponsesModel, async_demo: AsyncOpenAI) -> None:
    weather = Weather()
    first = await Runner.run(make_agent(demo, weather.tool), PARIS)
    second = await Runner.run(make_agent(demo, weather.tool), "ping", previous_response_id=first.last_response_id)
    assert first.last_response_id is not None
    assert second.last_response_id is not None
    stored = await async_demo.responses.retrieve(second.last_response_id)
    assert stored.previous_response_id == first.last_response_id
    (input_item,) = [item async for item in async_demo.responses.input_items.list(stored.id)]
    assert input_item.type == "message"


async def test_a_local_session_sends_all_items_back(demo: OpenAIResponsesModel) -> None:
    session = SQLiteSession("s-1")
    weather = Weather()
    agent = make_agent(demo, weather.tool)
    first = await Runner.run(agent, PARIS, session=session)
    assert first.final_output == ANSWER
    second = await Runner.run(agent, "ping", session=session)
    kinds = [item.get("type", "message") for item in await session.get_items()]
    assert kinds[:7] == [
        "message", "reasoning", "function_call", "function_call_output", "reasoning", "message", "message",
    ]  # fmt: skip
    tokens, earlier_tokens = second.raw_responses[0].usage.input_tokens, first.raw_responses[0].usage.input_tokens
    assert tokens > earlier_tokens


async def test_a_conversations_session_is_stored_by_the_gateway(
    demo: OpenAIResponsesModel, async_demo: AsyncOpenAI
) -> None:
    session = OpenAIConversationsSession(openai_client=async_demo)
    weather = Weather()
    first = await Runner.run(make_agent(demo, weather.tool), PARIS, session=session)
    assert first.final_output == ANSWER
    running = Runner.run_streamed(make_agent(demo, weather.tool), "ping", session=session)
    await read_stream(running)
    items = await session.get_items()
    kinds = [item.get("type") for item in items]
    assert kinds[:7] == [
        "message", "reasoning", "function_call", "function_call_output", "reasoning", "message", "message",
    ]  # fmt: skip
    popped: Any = await session.pop_item()
    assert popped["role"] == "assistant"
    assert len(await session.get_items()) == len(items) - 1
    await session.clear_session()


async def test_a_conversation_stores_the_items_of_a_run(demo: OpenAIResponsesModel, async_demo: AsyncOpenAI) -> None:
    conversation = await async_demo.conversations.create()
    weather = Weather()
    result = await Runner.run(make_agent(demo, weather.tool), PARIS, conversation_id=conversation.id)
    assert (weather.asked, result.final_output) == (["Paris"], ANSWER)
    kinds = [item.type async for item in async_demo.conversations.items.list(conversation.id, order="asc")]
    assert kinds == ["message", "reasoning", "function_call", "function_call_output", "reasoning", "message"]


async def test_an_agent_runs_as_a_tool_of_another_agent(scripted: OpenAIResponsesModel) -> None:
    inner = make_agent(scripted, name="inner", instructions="Rhyme.")
    tool = inner.as_tool(
        "transfer_to_poet", "Rhymes.", parameters=NoArguments, input_builder=lambda _: "script: an answer"
    )
    result = await Runner.run(make_agent(scripted, tool), "script: a handoff, then: an answer")
    assert [item.output for item in result.new_items if item.type == "tool_call_output_item"] == [SAID]
    assert result.final_output == SAID


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_truncated_call_is_not_executed(scripted: OpenAIResponsesModel, stream: bool) -> None:
    weather = Weather()
    agent = make_agent(scripted, weather.tool)
    run = run_streamed if stream else Runner.run
    with pytest.raises(ModelBehaviorError, match="max_output_tokens"):
        await run(agent, "script: a cut call")
    assert weather.asked == []


async def test_repeated_calls_stop_at_max_turns(scripted: OpenAIResponsesModel) -> None:
    weather = Weather()
    with pytest.raises(MaxTurnsExceeded):
        await Runner.run(make_agent(scripted, weather.tool), "script: two calls", max_turns=3)
    assert len(weather.asked) == 6


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_backend_failure_raises_an_sdk_error(scripted: OpenAIResponsesModel, stream: bool) -> None:
    run = run_streamed if stream else Runner.run
    with pytest.raises(openai.InternalServerError) as raised:
        await run(make_agent(scripted), "script: broken")
    assert raised.value.code == "backend_error"
