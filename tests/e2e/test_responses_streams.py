"""Streams of the Responses API: order of events, exactly one end, and the stored response."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.responses import ANSWER, CALL, OK, THOUGHT, TOOL, Json, Line, line, refusal, text_of
from tests.e2e.wires import WIRES
from tests.fakes import close_at, reset_at
from tests.fakes.faults import Fault

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOTS = ("/v1", "", "/open-responses/v1", "/open-responses")
DIALECTS = {"openai": "/v1", "open-responses": "/open-responses/v1"}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES.values(), ids=WIRES)
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with line(request.param) as running:
        yield running


@pytest.fixture(params=DIALECTS.values(), ids=list(DIALECTS))
def harness(site: Line, request: pytest.FixtureRequest) -> Line:
    return Line(site.wire, site.fake, site.gateway, request.param)


CUSTOM = {"type": "custom", "name": "run", "description": "Runs it."}
SPACE = {"type": "namespace", "name": "files", "tools": [{**TOOL, "name": "read"}]}
PREAMBLE = THOUGHT + "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
LOOK = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"sky"}<|call|>'
RUN = '<|channel|>commentary to=functions.run <|constrain|>json<|message|>{"input":"ls -l"}<|call|>'
READ = '<|channel|>commentary to=functions.files__read <|constrain|>json<|message|>{"p":1}<|call|>'

REASONING = ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"]
TEXT = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
SUMMARY = ["reasoning_summary_part.added", "reasoning_summary_text.delta"]
SUMMARY += ["reasoning_summary_text.done", "reasoning_summary_part.done"]
SUMMARIZED = [*REASONING[:2], *SUMMARY, *REASONING[2:]]
AUTO: Json = {"reasoning": {"summary": "auto"}}
ARGUMENTS = ["function_call_arguments.delta", "function_call_arguments.done"]
INPUT = ["custom_tool_call_input.delta", "custom_tool_call_input.done"]


@dataclass(frozen=True)
class Case:
    """Output of the model, and expected events: `item_events` and the `last` event."""

    output: str
    item_events: list[list[str]]
    last: str = "completed"
    fields: Json = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()


CASES: dict[str, Case] = {
    "answer": Case(OK, [TEXT]),
    "reasoning and answer": Case(ANSWER, [REASONING, TEXT]),
    "empty answer": Case("<|channel|>final<|message|><|return|>", [[TEXT[0], *TEXT[2:]]]),
    "call": Case(CALL, [REASONING, ARGUMENTS], fields={"tools": [TOOL]}),
    "preamble and call": Case(PREAMBLE + LOOK, [REASONING, TEXT, ARGUMENTS], fields={"tools": [TOOL]}),
    "custom call": Case(THOUGHT + RUN, [REASONING, INPUT], fields={"tools": [CUSTOM]}),
    "call in a namespace": Case(THOUGHT + READ, [REASONING, ARGUMENTS], fields={"tools": [SPACE]}),
    "truncated during the reasoning": Case(ANSWER, [REASONING], "incomplete", {"max_output_tokens": 4}),
    "truncated during the answer": Case(OK[:-10] + " and so on", [TEXT], "incomplete", {"max_output_tokens": 5}),
    "truncated during a call": Case(CALL, [REASONING], "incomplete", {"max_output_tokens": 18, "tools": [TOOL]}),
    "summary and answer": Case(ANSWER, [SUMMARIZED, TEXT], fields=AUTO),
    "summary of truncated reasoning": Case(ANSWER, [SUMMARIZED], "incomplete", {"max_output_tokens": 4, **AUTO}),
    "summary of broken reasoning": Case(ANSWER, [SUMMARIZED], "failed", AUTO, faults=(reset_at(4),)),
    "broken during the reasoning": Case(ANSWER, [REASONING], "failed", faults=(reset_at(4),)),
    "broken during the answer": Case(OK[:-10] + " and so on", [TEXT], "failed", faults=(close_at(5),)),
    "broken during a call": Case(CALL, [REASONING], "failed", {"tools": [TOOL]}, faults=(reset_at(18),)),
}


def short_types(types: list[str]) -> list[str]:
    """Remove prefixes, merge successive deltas, and use OpenAI's names."""
    without_prefix = (kind.removeprefix("response.").removeprefix("unisono:") for kind in types)
    openai = (kind.replace("reasoning.", "reasoning_text.") for kind in without_prefix)
    return [kind for kind, _ in groupby(openai)]


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_events_are_in_documented_order_and_fold_to_the_stored_response(harness: Line, case: Case) -> None:
    harness.say(case.output, faults=case.faults)
    stream = await harness.streamed(**case.fields)
    items = [["output_item.added", *events, "output_item.done"] for events in case.item_events]
    expected = [kind for events in items for kind in events] + (["error"] if case.last == "failed" else [])
    assert short_types(stream.types) == ["created", "in_progress", *expected, case.last]
    assert stream.last["status"] == case.last
    assert json.dumps(await harness.kept(stream.last)) == json.dumps(stream.last)
    assert {key for key in stream.last if key != "unisono"} == set(stream.events[0]["response"])
    assert stream.events[0]["response"] | {"unisono": 0} == stream.last | {
        key: stream.events[0]["response"][key]
        for key in ("status", "output", "usage", "error", "completed_at", "incomplete_details")
    } | {"unisono": 0}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.faults])
async def test_a_whole_response_equals_the_streamed_one_except_for_ids(harness: Line, name: str) -> None:
    case = CASES[name]
    harness.say(case.output)
    streamed = (await harness.streamed(**case.fields)).last
    harness.say(case.output)
    whole = await harness.whole(**case.fields)
    assert without_ids(whole) == without_ids(streamed)
    assert json.dumps(await harness.kept(whole)) == json.dumps(whole)


def without_ids(response: Json) -> Json:
    """Remove the fields that differ between two equal responses."""
    items = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": items}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_recovery_is_reported_at_the_end_and_stored(harness: Line, stream: bool) -> None:
    harness.say("<|channel|>analysis<|message|>Hm.<|return|>", "ok<|return|>")
    reply = await harness.post(stream=stream)
    response = reply.events[-1]["response"] if stream else reply.body
    assert text_of(response) == "ok"
    assert "analysis-only" in response["unisono"]["recoveries"]
    header = reply.headers.get("x-unisono-recoveries")
    assert header is None if stream else header == ",".join(response["unisono"]["recoveries"])
    assert reply.headers["x-unisono-backend"] == response["unisono"]["backend"] == f"{harness.wire.name}-1"
    assert (await harness.kept(response))["unisono"] == response["unisono"]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("position", range(16))
async def test_a_stream_that_breaks_at_any_token_ends_exactly_once(harness: Line, position: int) -> None:
    harness.say(PREAMBLE + LOOK, faults=(reset_at(position),))
    reply = await harness.post(stream=True, tools=[TOOL])
    if reply.status == 200:
        assert [event["type"] for event in reply.events[-2:]] == ["error", "response.failed"]
        assert reply.done
        response = reply.events[-1]["response"]
        assert response["error"] == {"code": "server_error", "message": error_fields(reply.events[-2])["message"]}
        assert await harness.kept(response) == response
    else:
        refusal(reply, 502)
        assert not reply.headers["content-type"].startswith("text/event-stream")


def error_fields(event: Json) -> Json:
    """Return the fields of an error event, which one dialect nests."""
    return dict(event.get("error") or event)


async def test_a_failure_before_any_output_is_an_http_error_and_not_stored(harness: Line) -> None:
    openai_harness = Line(harness.wire, harness.fake, harness.gateway)
    conversation = await openai_harness.conversation()
    for stream in (False, True):
        harness.say(ANSWER, faults=(reset_at(0),))
        refusal(await harness.post(stream=stream, conversation=conversation), 502, code="backend_protocol_error")
        assert await openai_harness.items(conversation) == []


async def test_the_dialects_differ_only_where_required(site: Line) -> None:
    tools = [CUSTOM, {"type": "web_search"}]
    streams: dict[str, Any] = {}
    for name, root in DIALECTS.items():
        dialect = Line(site.wire, site.fake, site.gateway, root)
        site.say(THOUGHT + RUN)
        streams[name] = await dialect.streamed(tools=tools)
    assert {"response.reasoning_text.delta", "response.custom_tool_call_input.done"} < set(streams["openai"].types)
    open_responses_types = set(streams["open-responses"].types)
    assert {"response.reasoning.delta", "unisono:custom_tool_call_input.done"} < open_responses_types
    assert [item["type"] for item in streams["openai"].last["output"]] == ["reasoning", "custom_tool_call"]
    assert [item["type"] for item in streams["open-responses"].last["output"]] == [
        "reasoning",
        "unisono:custom_tool_call",
    ]
    assert [tool["type"] for tool in streams["open-responses"].last["tools"]] == [
        "unisono:custom",
        "unisono:web_search",
    ]
    # The stored response belongs to no dialect; each dialect renders it in its own form.
    stored = await site.kept(streams["open-responses"].last)
    assert [item["type"] for item in stored["output"]] == ["reasoning", "custom_tool_call"]
    site.say(OK[:-10] + " and so on", faults=(reset_at(5),))
    flat_error = (await site.streamed()).events[-2]
    assert set(flat_error) == {"type", "sequence_number", "code", "message", "param"}
    site.say(OK[:-10] + " and so on", faults=(reset_at(5),))
    nested_error = (await Line(site.wire, site.fake, site.gateway, "/open-responses/v1").streamed()).events[-2]
    assert set(nested_error) == {"type", "sequence_number", "error"}
    assert set(nested_error["error"]) == {"type", "code", "message", "param"}


@pytest.mark.parametrize("root", ROOTS)
async def test_every_prefix_serves_the_whole_api(site: Line, root: str) -> None:
    harness_at_root = Line(site.wire, site.fake, site.gateway, root)
    harness_at_root.say(ANSWER)
    for stream in (False, True):
        response = await harness_at_root.responds(stream=stream)
        path = f"/responses/{response['id']}"
        assert (await harness_at_root.get(path)).body == response
        assert (await harness_at_root.get(f"{path}/input_items")).body["data"][0]["content"][0]["text"] == "Hi"
        refusal(await harness_at_root.made(f"{path}/cancel"), 400, "response_id")
        refusal(await harness_at_root.get(f"{path}?stream=true"), 400, "stream")
        async with harness_at_root.gateway.session.delete(f"{harness_at_root.gateway.url}{root}{path}") as deleted:
            assert await deleted.json() == {"id": response["id"], "object": "response", "deleted": True}
        refusal(await harness_at_root.get(path), 404, "response_id")
        refusal(
            await harness_at_root.post(stream=stream, previous_response_id=response["id"]), 404, "previous_response_id"
        )
        refusal(await harness_at_root.post(stream=stream, model="nobody"), 404, "model", "model_not_found")
        refusal(await harness_at_root.post(stream=stream, temperature=9), 400, "temperature")
    assert (await harness_at_root.post("/input_tokens")).body["input_tokens"] > 10


async def test_usage_counts_input_and_output_tokens(site: Line) -> None:
    site.say(ANSWER)
    usage = (await site.whole())["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 2
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens"] == (await site.post("/input_tokens")).body["input_tokens"]
    assert set(usage["input_tokens_details"]) == {"cached_tokens", "cache_write_tokens"}
