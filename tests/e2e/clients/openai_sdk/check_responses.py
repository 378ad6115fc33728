"""Responses API through the OpenAI SDK: whole answers, streams, helpers, headers and fields."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai_sdk.responding import ECHO, WEATHER, about, call_in, folded, thoughts_in, to_ask, to_play, watched
from pydantic import BaseModel

from conftest import Stage

HELLO = "Hello! How can I help you today?"


def test_a_whole_response_has_reasoning_and_a_message(demo: OpenAI) -> None:
    response = demo.responses.create(**to_ask("Hello!"))
    reasoning, message = response.output
    assert reasoning.type == "reasoning"
    assert (reasoning.status, reasoning.summary, reasoning.encrypted_content) == ("completed", [], None)
    assert thoughts_in(response) == "The user wants a short reply."
    assert message.type == "message"
    assert (message.role, message.status, message.phase) == ("assistant", "completed", "final_answer")
    assert response.output_text == HELLO
    assert (reasoning.id[:3], message.id[:4], response.id[:5]) == ("rs_", "msg_", "resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", "gpt-oss-demo")
    assert (response.error, response.incomplete_details, response.background) == (None, None, False)
    assert abs(response.created_at - time.time()) < 60
    assert response.completed_at is not None
    assert response.completed_at >= response.created_at
    assert about(response) == {"recoveries": [], "failovers": 0, "backend": "mlx-1"}


@pytest.mark.slow
def test_usage_reports_reasoning_tokens(demo: OpenAI) -> None:
    usage = demo.responses.create(**to_ask("Hello!")).usage
    assert usage is not None
    assert usage.input_tokens > 50
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert 0 <= usage.input_tokens_details.cached_tokens < usage.input_tokens


# Case: (whether on the scripted backend, fields, status, types of the output).
STREAMS: dict[str, tuple[bool, dict[str, Any], str, list[str]]] = {
    "an answer": (False, to_ask("Hello!"), "completed", ["reasoning", "message"]),
    "a preamble and a call": (
        True,
        to_play("a preamble", tools=[WEATHER]),
        "completed",
        ["reasoning", "message", "function_call"],
    ),
    "no reasoning": (True, to_play("no channel"), "completed", ["message"]),
    "two calls": (
        True,
        to_play("two calls", tools=[WEATHER]),
        "completed",
        ["reasoning", "function_call", "function_call"],
    ),
    "a call with early arguments": (
        True,
        to_play("two calls", model="early", tools=[WEATHER]),
        "completed",
        ["reasoning", "function_call", "function_call"],
    ),
    "a custom call": (True, to_play("a custom call", tools=[ECHO]), "completed", ["reasoning", "custom_tool_call"]),
    "a truncated call": (True, to_play("a cut call", tools=[WEATHER]), "incomplete", ["reasoning"]),
    "a truncated call with early arguments": (
        True,
        to_play("a cut call", model="early", tools=[WEATHER]),
        "incomplete",
        ["reasoning", "function_call"],
    ),
    "the token limit in a message": (
        True,
        to_play("slow", max_output_tokens=20),
        "incomplete",
        ["reasoning", "message"],
    ),
    "the token limit in reasoning": (
        True,
        to_play("an answer", max_output_tokens=5),
        "incomplete",
        ["reasoning"],
    ),
    "encrypted reasoning": (
        True,
        to_play("an answer", include=["reasoning.encrypted_content"]),
        "completed",
        ["reasoning", "message"],
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_adds_up_to_the_stored_response(demo: OpenAI, scripted: OpenAI, name: str) -> None:
    on_scripted, fields, status, kinds = STREAMS[name]
    client = scripted if on_scripted else demo
    response = folded(watched(client, fields))
    assert response["status"] == status
    assert [item["type"] for item in response["output"]] == kinds
    stored = client.responses.with_raw_response.retrieve(response["id"])
    assert stored.http_response.json() == response


@pytest.mark.parametrize("name", [name for name in STREAMS if name != "a truncated call with early arguments"])
def test_a_stream_matches_the_whole_response(demo: OpenAI, scripted: OpenAI, name: str) -> None:
    on_scripted, fields, _, _ = STREAMS[name]
    client = scripted if on_scripted else demo
    whole = client.responses.with_raw_response.create(**fields).http_response.json()
    assert comparable(folded(watched(client, fields))) == comparable(whole)


def comparable(value: Any) -> Any:
    """Return a response without the fields that differ between two requests.

    These are ids, times, cached tokens, and the number of tokens that a backend generated before it was stopped.
    """
    if isinstance(value, list):
        return [comparable(element) for element in value]
    if not isinstance(value, dict):
        return value
    volatile = ("id", "call_id", "created_at", "completed_at", "encrypted_content", "input_tokens_details")
    volatile += ("output_tokens", "total_tokens")
    return {name: comparable(element) for name, element in value.items() if name not in volatile}


@pytest.mark.slow
def test_reasoning_streams_before_the_text(demo: OpenAI) -> None:
    deltas: list[tuple[str, str]] = []
    for event in demo.responses.create(**to_ask("Count to 30."), stream=True):
        if event.type in ("response.reasoning_text.delta", "response.output_text.delta"):
            deltas.append((event.type, event.delta))
    kinds = [kind for kind, _ in deltas]
    assert kinds == sorted(kinds, reverse=True)
    assert kinds.count("response.output_text.delta") > 10
    answer = "".join(text for kind, text in deltas if kind == "response.output_text.delta")
    assert answer == ", ".join(map(str, range(1, 31))) + "."


def test_a_slow_answer_is_streamed_incrementally(scripted: OpenAI) -> None:
    started = time.monotonic()
    times = [
        time.monotonic() - started
        for event in scripted.responses.create(**to_play("slow", max_output_tokens=40), stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert times[-1] > 0.6
    assert sum(later - earlier > 0.005 for earlier, later in pairwise(times)) > 15


def test_the_stream_helper_returns_the_stored_response(demo: OpenAI) -> None:
    snapshots: list[str] = []
    with demo.responses.stream(**to_ask("Hello!")) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                snapshots.append(event.snapshot)
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == HELLO
    assert all(HELLO.startswith(snapshot) for snapshot in snapshots)
    stored = demo.responses.retrieve(final.id)
    assert [item.to_dict()["id"] for item in final.output] == [item.to_dict()["id"] for item in stored.output]
    assert (final.usage, final.output_text, final.status) == (stored.usage, stored.output_text, stored.status)


class Weather(BaseModel):
    """Gets the current weather in a city."""

    location: str


def test_the_stream_helper_emits_arguments_incrementally(scripted: OpenAI) -> None:
    snapshots: list[str] = []
    with scripted.responses.stream(**to_play("two calls, slowly", model="early", tools=[WEATHER])) as stream:
        for event in stream:
            if event.type == "response.function_call_arguments.delta":
                snapshots.append(event.snapshot)
        final = stream.get_final_response()
    arguments = [item.arguments for item in final.output if item.type == "function_call"]
    assert arguments == ['{"location":"Paris"}', '{"location":"Rome"}']
    assert set(arguments) <= set(snapshots)
    assert len(snapshots) > len(arguments)


@pytest.mark.slow
def test_parse_reads_plain_text_and_arguments(demo: OpenAI) -> None:
    from openai import pydantic_function_tool

    assert demo.responses.parse(**to_ask("Hello!")).output_text == HELLO
    tool: Any = pydantic_function_tool(Weather, name="get_weather", description=WEATHER["description"])
    answer = demo.responses.parse(**to_ask("What is the weather in Paris?", tools=[tool]))
    assert call_in(answer).parsed_arguments == Weather(location="Paris")


@pytest.mark.slow
def test_a_whole_response_has_headers(demo: OpenAI) -> None:
    raw = demo.responses.with_raw_response.create(**to_ask("ping"))
    assert (raw.status_code, raw.headers["content-type"]) == (200, "application/json")
    assert raw.headers["x-unisono-backend"] == "mlx-1"
    assert "x-unisono-recoveries" not in raw.headers
    assert raw.headers["x-request-id"].startswith("req_")
    response = raw.parse()
    assert response.output_text == "pong"
    assert response._request_id == raw.headers["x-request-id"]


@pytest.mark.slow
def test_stream_headers_precede_the_first_event(demo: OpenAI) -> None:
    raw = demo.responses.with_raw_response.create(**to_ask("ping"), stream=True)
    assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert raw.headers["x-unisono-backend"] == "mlx-1"
    assert [event.type for event in raw.parse()][-1] == "response.completed"


def test_recoveries_are_reported_in_a_header_and_in_the_body(demo: OpenAI) -> None:
    raw = demo.responses.with_raw_response.create(**to_ask("glitch double start"))
    assert raw.headers["x-unisono-recoveries"] == "doubled-start"
    response = raw.parse()
    assert (response.output_text, about(response)["recoveries"]) == ("Done.", ["doubled-start"])


def test_a_response_echoes_the_fields_of_its_request(scripted: OpenAI) -> None:
    response = scripted.responses.create(
        **to_play(
            "an answer",
            instructions="Be brief.",
            max_output_tokens=500,
            metadata={"purpose": "check"},
            parallel_tool_calls=False,
            prompt_cache_key="k",
            reasoning={"effort": "high"},
            safety_identifier="s",
            tool_choice="auto",
            tools=[WEATHER, ECHO],
            top_p=0.5,
            truncation="auto",
        )
    )
    assert (response.instructions, response.max_output_tokens, response.metadata) == (
        "Be brief.", 500, {"purpose": "check"}
    )  # fmt: skip
    assert (response.parallel_tool_calls, response.prompt_cache_key, response.safety_identifier) == (False, "k", "s")
    assert response.reasoning is not None
    assert (response.reasoning.effort, response.tool_choice, response.truncation) == ("high", "auto", "auto")
    assert (response.temperature, response.top_p) == (0, 0.5)
    assert [tool.type for tool in response.tools] == ["function", "custom"]
    assert "notes" not in about(response)


def test_fields_without_effect_are_accepted_and_noted(scripted: OpenAI) -> None:
    response = scripted.responses.create(
        **to_play("an answer", service_tier="auto", text={"verbosity": "low"}, extra_body={"something_else": 1})
    )
    assert response.output_text == "Here is the answer."
    noted = {note.partition(":")[0] for note in about(response)["notes"]}
    assert {"service_tier", "text.verbosity", "something_else"} <= noted


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh"])
def test_every_reasoning_effort_is_accepted(scripted: OpenAI, effort: Any) -> None:
    response = scripted.responses.create(**to_play("an answer", reasoning={"effort": effort}))
    assert response.reasoning is not None
    assert response.reasoning.effort in ("low", "medium", "high")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", "/", "/v1/"])
def test_every_form_of_base_url_works(stage: Stage, connect: Callable[..., OpenAI], suffix: str) -> None:
    client = connect(stage.demo + suffix)
    response = client.responses.create(**to_ask("ping"))
    assert client.responses.retrieve(response.id).output_text == response.output_text == "pong"


@pytest.mark.slow
async def test_the_async_client_gets_whole_and_streamed_responses(async_demo: AsyncOpenAI) -> None:
    response = await async_demo.responses.create(**to_ask("ping"))
    assert response.output_text == "pong"
    async with async_demo.responses.stream(**to_ask("ping")) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert (kinds[0], kinds[-1], final.output_text) == ("response.created", "response.completed", "pong")
    stored = await async_demo.responses.retrieve(final.id)
    assert stored.output_text == "pong"


@pytest.mark.slow
async def test_concurrent_requests_get_their_own_answers(async_demo: AsyncOpenAI) -> None:
    expected = {"ping": "pong", "What is 2 + 2?": "2 + 2 is 4.", "What color is the sky?": "The sky is blue."}

    async def answer(question: str) -> str:
        async with async_demo.responses.stream(**to_ask(question)) as stream:
            return (await stream.get_final_response()).output_text

    questions = [*expected] * 2
    assert await asyncio.gather(*map(answer, questions)) == [expected[question] for question in questions]
