"""Pydantic AI agents on its Responses model: runs, tools, results, streams and histories."""

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
    """Weather tool that records its arguments."""

    def __init__(self, *answers: str) -> None:
        super().__init__(*answers)
        self.tool: Tool[Any] = Tool(self.get_weather)


def agent_of(model: OpenAIResponsesModel, *tools: Tool[Any], **fields: Any) -> Agent[Any, Any]:
    settings: Any = {"temperature": 0, **fields.pop("settings", {})}
    return Agent(model, tools=tools, model_settings=settings, **fields)


def responses_in(messages: Any) -> list[ModelResponse]:
    return [message for message in messages if isinstance(message, ModelResponse)]


async def test_run_returns_text_and_thinking_parts(demo: OpenAIResponsesModel) -> None:
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


async def test_streamed_run_yields_text_in_pieces(demo: OpenAIResponsesModel) -> None:
    async with agent_of(demo).run_stream("Count to 30.") as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 10
    assert "".join(pieces) == ", ".join(map(str, range(1, 31))) + "."


async def test_event_stream_contains_calls_results_and_deltas(demo: OpenAIResponsesModel) -> None:
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


# how the requests of one run refer to each other
HISTORY_SETTINGS: dict[str, OpenAIResponsesModelSettings] = {
    "full history": {},
    "history without item ids": {"openai_send_reasoning_ids": False},
    "previous_response_id": {"openai_previous_response_id": "auto"},
    "not stored": {"openai_store": False},
}


@pytest.mark.parametrize("mode", HISTORY_SETTINGS)
async def test_tool_loop_answers_with_any_history_setting(
    demo: OpenAIResponsesModel, async_demo: AsyncOpenAI, mode: str
) -> None:
    weather = Weather()
    settings = HISTORY_SETTINGS[mode]
    result = await agent_of(demo, weather.tool, settings=settings).run(PARIS)
    assert (weather.asked, result.output) == (["Paris"], ANSWER)
    first, second = responses_in(result.all_messages())
    assert [type(part) for part in first.parts] == [ThinkingPart, ToolCallPart]
    assert result.usage.requests == 2
    if "openai_previous_response_id" in settings:
        assert second.provider_response_id is not None
        stored = await async_demo.responses.retrieve(second.provider_response_id)
        assert stored.previous_response_id == first.provider_response_id
    if mode in ("full history", "previous_response_id"):
        assert second.usage.cache_read_tokens >= first.usage.total_tokens - 8


async def test_streamed_run_calls_the_tool(demo: OpenAIResponsesModel) -> None:
    weather = Weather()
    async with agent_of(demo, weather.tool).run_stream(PARIS) as result:
        assert await result.get_output() == ANSWER
    assert weather.asked == ["Paris"]


async def test_two_sequential_tool_calls_end_in_an_answer(demo: OpenAIResponsesModel) -> None:
    weather = Weather("18 degrees, sunny", "11 degrees, rainy")
    result = await agent_of(demo, weather.tool).run("Compare the weather in London and Tokyo.")
    assert (weather.asked, result.output) == (["London", "Tokyo"], "I compared London and Tokyo.")


async def test_parallel_tool_calls_end_in_an_answer(scripted: OpenAIResponsesModel) -> None:
    weather = Weather()
    result = await agent_of(scripted, weather.tool).run("script: two calls, then: an answer")
    assert (sorted(weather.asked), result.output) == (["Paris", "Rome"], SAID)


class Report(BaseModel):
    """Weather report."""

    city: str
    degrees: int


async def test_output_tool_call_becomes_the_result(scripted: OpenAIResponsesModel) -> None:
    # Text is allowed as output too, so that the library does not force the tool call.
    agent = agent_of(scripted, output_type=[ToolOutput(Report, name="final_result"), str])
    assert (await agent.run("script: a result")).output == Report(city="Paris", degrees=18)
    assert (await agent.run("script: an answer")).output == SAID
    async with agent.run_stream("script: a result") as result:
        assert await result.get_output() == Report(city="Paris", degrees=18)


@pytest.mark.parametrize("stored", [False, True], ids=["objects", "serialized to JSON"])
async def test_message_history_is_accepted_by_the_next_run(demo: OpenAIResponsesModel, stored: bool) -> None:
    weather = Weather()
    agent = agent_of(demo, weather.tool)
    history = (await agent.run(PARIS)).all_messages()
    if stored:
        history = ModelMessagesTypeAdapter.validate_json(ModelMessagesTypeAdapter.dump_json(history))
    result = await agent.run("ping", message_history=history)
    assert weather.asked[0] == "Paris"
    assert len(result.all_messages()) > len(history)
    usage, usage_before = (responses_in(messages)[-1].usage for messages in (result.new_messages(), history))
    assert usage.input_tokens > usage_before.input_tokens - 40


async def test_previous_response_id_continues_a_history(
    scripted: OpenAIResponsesModel, async_scripted: AsyncOpenAI
) -> None:
    settings = OpenAIResponsesModelSettings(openai_previous_response_id="auto")
    agent = agent_of(scripted, settings=settings)
    first = await agent.run("script: an answer")
    second = await agent.run("script: an answer", message_history=first.all_messages())
    ids = [responses_in(result.new_messages())[0].provider_response_id for result in (first, second)]
    assert ids[1] is not None
    stored = await async_scripted.responses.retrieve(ids[1])
    assert stored.previous_response_id == ids[0]
    assert len([item async for item in async_scripted.responses.input_items.list(ids[1])]) == 1


async def test_instructions_are_stored_in_the_response(
    scripted: OpenAIResponsesModel, async_scripted: AsyncOpenAI
) -> None:
    result = await agent_of(scripted, instructions="Be brief.").run("script: an answer")
    response_id = responses_in(result.all_messages())[0].provider_response_id
    assert response_id is not None
    assert (await async_scripted.responses.retrieve(response_id)).instructions == "Be brief."


async def test_token_limit_ends_an_answer_with_finish_reason_length(scripted: OpenAIResponsesModel) -> None:
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
async def test_backend_failure_raises_a_model_http_error(
    scripted: OpenAIResponsesModel, script: str, status: int, code: str
) -> None:
    with pytest.raises(ModelHTTPError) as raised:
        await agent_of(scripted).run(f"script: {script}")
    body: Any = raised.value.body
    assert (raised.value.status_code, body["code"]) == (status, code)
