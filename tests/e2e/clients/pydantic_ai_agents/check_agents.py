"""Agents of Pydantic AI on its model for the Responses API: runs, tools, results, streams, and histories sent back."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, Tool, ToolOutput
from pydantic_ai.messages import (
    ModelMessagesTypeAdapter,
    ModelResponse,
    PartDeltaEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
    ToolCallPart,
)
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings
from weather import ANSWER, HELLO, PARIS, SAID, Asked


class Weather(Asked):
    """A tool that remembers what it was asked."""

    def __init__(self, *answers: str) -> None:
        super().__init__(*answers)
        self.tool: Tool[Any] = Tool(self.get_weather)


def agent_of(model: OpenAIResponsesModel, *tools: Tool[Any], **fields: Any) -> Agent[Any, Any]:
    settings: Any = {"temperature": 0, **fields.pop("settings", {})}
    return Agent(model, tools=tools, model_settings=settings, **fields)


def responses_in(messages: Any) -> list[ModelResponse]:
    return [message for message in messages if isinstance(message, ModelResponse)]


async def test_an_answer_and_its_thought(demo: OpenAIResponsesModel) -> None:
    result = await agent_of(demo).run("Hello!")
    assert result.output == HELLO
    (response,) = responses_in(result.all_messages())
    thought, text = response.parts
    assert isinstance(thought, ThinkingPart)
    assert isinstance(text, TextPart)
    assert (thought.id or "").startswith("rs_")
    assert (response.model_name, response.finish_reason) == ("gpt-oss-demo", "stop")
    assert (response.provider_response_id or "").startswith("resp_")
    usage = result.usage
    assert usage.input_tokens > 50
    assert usage.details["reasoning_tokens"] > 0


async def test_a_streamed_answer(demo: OpenAIResponsesModel) -> None:
    async with agent_of(demo).run_stream("Count to 30.") as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 10
    assert "".join(pieces) == ", ".join(map(str, range(1, 31))) + "."


async def test_every_event_of_a_run(demo: OpenAIResponsesModel) -> None:
    weather = Weather()
    events: list[Any] = []
    async with agent_of(demo, weather.tool).run_stream_events(PARIS) as stream:
        events = [event async for event in stream]
    kinds = [event.event_kind for event in events]
    assert kinds.count("function_tool_call") == kinds.count("function_tool_result") == 1
    assert events[-1].result.output == ANSWER
    deltas = [event.delta for event in events if isinstance(event, PartDeltaEvent)]
    assert any(isinstance(delta, ThinkingPartDelta) for delta in deltas)
    assert any(isinstance(delta, TextPartDelta) for delta in deltas)


# how turns of one run hang together
WAYS: dict[str, OpenAIResponsesModelSettings] = {
    "everything is sent back": {},
    "without the names of items": {"openai_send_reasoning_ids": False},
    "each answer names the one before": {"openai_previous_response_id": "auto"},
    "nothing is kept": {"openai_store": False},
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_tool_loop(demo: OpenAIResponsesModel, async_demo: AsyncOpenAI, way: str) -> None:
    weather = Weather()
    settings = WAYS[way]
    result = await agent_of(demo, weather.tool, settings=settings).run(PARIS)
    assert (weather.asked, result.output) == (["Paris"], ANSWER)
    first, second = responses_in(result.all_messages())
    assert [type(part) for part in first.parts] == [ThinkingPart, ToolCallPart]
    assert result.usage.requests == 2
    if "openai_previous_response_id" in settings:
        assert second.provider_response_id is not None
        kept = await async_demo.responses.retrieve(second.provider_response_id)
        assert kept.previous_response_id == first.provider_response_id
    if way in ("everything is sent back", "each answer names the one before"):
        assert second.usage.cache_read_tokens >= first.usage.total_tokens - 8


async def test_a_streamed_tool_loop(demo: OpenAIResponsesModel) -> None:
    weather = Weather()
    async with agent_of(demo, weather.tool).run_stream(PARIS) as result:
        assert await result.get_output() == ANSWER
    assert weather.asked == ["Paris"]


async def test_two_calls_in_turn(demo: OpenAIResponsesModel) -> None:
    weather = Weather("18 degrees, sunny", "11 degrees, rainy")
    result = await agent_of(demo, weather.tool).run("Compare the weather in London and Tokyo.")
    assert (weather.asked, result.output) == (["London", "Tokyo"], "I compared London and Tokyo.")


async def test_calls_side_by_side(scripted: OpenAIResponsesModel) -> None:
    weather = Weather()
    result = await agent_of(scripted, weather.tool).run("script: two calls, then: an answer")
    assert (sorted(weather.asked), result.output) == (["Paris", "Rome"], SAID)


class Report(BaseModel):
    """What the weather is."""

    city: str
    degrees: int


async def test_a_result_that_is_a_call(scripted: OpenAIResponsesModel) -> None:
    # Text is a result too, so that the library leaves the choice to the model.
    agent = agent_of(scripted, output_type=[ToolOutput(Report, name="final_result"), str])
    assert (await agent.run("script: a result")).output == Report(city="Paris", degrees=18)
    assert (await agent.run("script: an answer")).output == SAID
    async with agent.run_stream("script: a result") as result:
        assert await result.get_output() == Report(city="Paris", degrees=18)


@pytest.mark.parametrize("stored", [False, True], ids=["as it is", "through JSON"])
async def test_a_history_sent_back(demo: OpenAIResponsesModel, stored: bool) -> None:
    weather = Weather()
    agent = agent_of(demo, weather.tool)
    history = (await agent.run(PARIS)).all_messages()
    if stored:
        history = ModelMessagesTypeAdapter.validate_json(ModelMessagesTypeAdapter.dump_json(history))
    result = await agent.run("ping", message_history=history)
    assert weather.asked[0] == "Paris"
    assert len(result.all_messages()) > len(history)
    sent, sent_before = (responses_in(messages)[-1].usage for messages in (result.new_messages(), history))
    assert sent.input_tokens > sent_before.input_tokens - 40


async def test_a_history_continued_by_name(scripted: OpenAIResponsesModel, async_scripted: AsyncOpenAI) -> None:
    settings = OpenAIResponsesModelSettings(openai_previous_response_id="auto")
    agent = agent_of(scripted, settings=settings)
    first = await agent.run("script: an answer")
    second = await agent.run("script: an answer", message_history=first.all_messages())
    ids = [responses_in(result.new_messages())[0].provider_response_id for result in (first, second)]
    assert ids[1] is not None
    kept = await async_scripted.responses.retrieve(ids[1])
    assert kept.previous_response_id == ids[0]
    assert len([item async for item in async_scripted.responses.input_items.list(ids[1])]) == 1


async def test_instructions_reach_the_model(scripted: OpenAIResponsesModel, async_scripted: AsyncOpenAI) -> None:
    result = await agent_of(scripted, instructions="Be brief.").run("script: an answer")
    response_id = responses_in(result.all_messages())[0].provider_response_id
    assert response_id is not None
    assert (await async_scripted.responses.retrieve(response_id)).instructions == "Be brief."


async def test_an_answer_cut_by_the_token_limit(scripted: OpenAIResponsesModel) -> None:
    result = await agent_of(scripted, settings={"max_tokens": 20}).run("script: slow")
    assert result.output.startswith(" word")
    assert responses_in(result.all_messages())[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        ("broken", 502, "backend_error"),
        ("busy", 503, "backend_overloaded"),
        ("too long", 400, "context_length_exceeded"),
    ],
)
async def test_a_failing_backend_is_an_error_of_the_library(
    scripted: OpenAIResponsesModel, script: str, status: int, code: str
) -> None:
    with pytest.raises(ModelHTTPError) as raised:
        await agent_of(scripted).run(f"script: {script}")
    body: Any = raised.value.body
    assert (raised.value.status_code, body["code"]) == (status, code)
