"""Responses of models without Harmony, passed to the Responses API of the backend unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway
from tests.fakes import FakeVllm, Refusal, close_at
from tests.fakes.openai_api import FakeOpenAi, OpenAiScript
from tests.passthrough.test_passing_chat import HARMONY, entry, oss_entry, passed, served

STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def respond(running: Gateway, **fields: Any) -> Answer:
    return await running.post("/v1/responses", json.dumps({"model": "other", "input": "Hi", **fields}).encode())


ODD = {
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "data:AAAA"}]}],
    "store": True,
    "tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}],
    "nobody_knows": [{"this": None}],
    "previous_response_id": None,
    "background": False,
}


@STREAM
async def test_the_body_is_forwarded_unchanged_except_for_the_model(stream: bool) -> None:
    async with passed() as (running, fake):
        answer = await respond(running, stream=stream, **ODD)
    [seen] = fake.requests
    assert answer.status == 200, answer.raw
    assert seen.path == "/v1/responses"
    assert seen.json == {**ODD, "model": "qwen", "stream": stream}


async def test_a_response_is_returned_unchanged_except_for_the_model() -> None:
    script = OpenAiScript(extra={"metadata": {"a": "b"}, "unknown": [1]})
    async with passed(script) as (running, _):
        answer = await respond(running)
    assert answer.body["id"] == "resp_there"
    assert answer.body["model"] == "other"
    assert answer.body["output"][0]["content"][0]["text"] == "Four."
    assert (answer.body["metadata"], answer.body["unknown"]) == ({"a": "b"}, [1])
    assert answer.headers["x-unisono-backend"] == "vllm-1"


async def test_events_are_returned_in_order_with_their_names() -> None:
    async with passed() as (running, _):
        answer = await respond(running, stream=True)
    kinds = [event["type"] for event in answer.events]
    assert kinds == ["response.created", *["response.output_text.delta"] * 2, "response.completed"]
    named = [line[7:] for line in answer.raw.decode().split("\n") if line.startswith("event: ")]
    assert named == kinds
    assert {event["response"]["model"] for event in answer.events if "response" in event} == {"other"}
    assert [event["sequence_number"] for event in answer.events] == [0, 1, 2, 3]
    assert not answer.done


async def test_a_broken_stream_ends_with_an_error_event() -> None:
    async with passed(OpenAiScript(delay_s=0.02, faults=(close_at(2),))) as (running, _):
        answer = await respond(running, stream=True)
    assert answer.events[-1]["type"] == "error"
    assert answer.events[-1]["code"] == "backend_protocol_error"


STATEFUL: dict[str, tuple[dict[str, Any], str]] = {
    "background": ({"background": True}, "background"),
    "previous response": ({"previous_response_id": "resp_x"}, "previous_response_id"),
    "conversation": ({"conversation": "conv_x"}, "conversation"),
    "MCP server": ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools.0"),
}


@STREAM
@pytest.mark.parametrize(("fields", "param"), STATEFUL.values(), ids=STATEFUL)
async def test_stateful_fields_are_refused(fields: dict[str, Any], param: str, stream: bool) -> None:
    async with passed() as (running, fake):
        answer = await respond(running, stream=stream, **fields)
    error = answer.body["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "unsupported_value", param)
    assert fake.requests == []


ENDPOINTS = ("input_tokens", "compact")


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_other_responses_endpoints_are_refused(path: str) -> None:
    async with passed() as (running, fake):
        answer = await running.post(f"/v1/responses/{path}", b'{"model": "other", "input": "Hi"}')
    assert (answer.status, answer.body["error"]["param"]) == (400, "model")
    assert fake.requests == []


async def test_a_backend_without_a_responses_api_is_refused() -> None:
    async with FakeOpenAi() as fake, served(entry(fake.url, "mlx_server/any")) as running:
        answer = await respond(running)
    assert (answer.status, answer.body["error"]["param"]) == (400, "model")
    assert "chat completion" in answer.body["error"]["message"]


async def test_gpt_oss_continues_its_own_responses_in_a_mixed_group() -> None:
    async with (
        FakeVllm(tokens=HARMONY) as oss,
        FakeOpenAi() as other,
        served(oss_entry(oss.url, "other"), entry(other.url)) as running,
    ):
        answer = await respond(running)
        following = await respond(running, previous_response_id=answer.body["id"])
    assert (answer.status, following.status) == (200, 200)
    assert other.requests == []


@STREAM
async def test_failures_before_the_first_event_are_http_errors(stream: bool) -> None:
    async with passed(Refusal(500, b"{}")) as (running, _):
        answer = await respond(running, stream=stream)
    assert (answer.status, answer.body["error"]["code"]) == (502, "backend_error")
