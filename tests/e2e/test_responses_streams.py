"""Streams of the Responses API: the order of the catalogue, one end, and the very response that is kept."""

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
    async with line(request.param) as here:
        yield here


@pytest.fixture(params=DIALECTS.values(), ids=list(DIALECTS))
def talk(site: Line, request: pytest.FixtureRequest) -> Line:
    return Line(site.wire, site.fake, site.gateway, request.param)


CUSTOM = {"type": "custom", "name": "run", "description": "Runs it."}
SPACE = {"type": "namespace", "name": "files", "tools": [{**TOOL, "name": "read"}]}
PREAMBLE = THOUGHT + "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
LOOK = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"sky"}<|call|>'
RUN = '<|channel|>commentary to=functions.run <|constrain|>json<|message|>{"input":"ls -l"}<|call|>'
READ = '<|channel|>commentary to=functions.files__read <|constrain|>json<|message|>{"p":1}<|call|>'

REASONING = ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"]
TEXT = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
ARGUMENTS = ["function_call_arguments.delta", "function_call_arguments.done"]
INPUT = ["custom_tool_call_input.delta", "custom_tool_call_input.done"]


@dataclass(frozen=True)
class Case:
    """What the model says and how the stream must go: `lives` of items between the first events and the `last`."""

    output: str
    lives: list[list[str]]
    last: str = "completed"
    asked: Json = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()


CASES: dict[str, Case] = {
    "an answer": Case(OK, [TEXT]),
    "thoughts and an answer": Case(ANSWER, [REASONING, TEXT]),
    "nothing": Case("<|channel|>final<|message|><|return|>", [[TEXT[0], *TEXT[2:]]]),
    "a call": Case(CALL, [REASONING, ARGUMENTS], asked={"tools": [TOOL]}),
    "a preamble and a call": Case(PREAMBLE + LOOK, [REASONING, TEXT, ARGUMENTS], asked={"tools": [TOOL]}),
    "a custom call": Case(THOUGHT + RUN, [REASONING, INPUT], asked={"tools": [CUSTOM]}),
    "a call in a namespace": Case(THOUGHT + READ, [REASONING, ARGUMENTS], asked={"tools": [SPACE]}),
    "cut amid the thoughts": Case(ANSWER, [REASONING], "incomplete", {"max_output_tokens": 4}),
    "cut amid the answer": Case(OK[:-10] + " and so on", [TEXT], "incomplete", {"max_output_tokens": 5}),
    "cut amid a call": Case(CALL, [REASONING], "incomplete", {"max_output_tokens": 18, "tools": [TOOL]}),
    "broken amid the thoughts": Case(ANSWER, [REASONING], "failed", faults=(reset_at(4),)),
    "broken amid the answer": Case(OK[:-10] + " and so on", [TEXT], "failed", faults=(close_at(5),)),
    "broken amid a call": Case(CALL, [REASONING], "failed", {"tools": [TOOL]}, faults=(reset_at(18),)),
}


def stems(types: list[str]) -> list[str]:
    """Types without their prefix, deltas of one life as one, both dialects' names as OpenAI's."""
    bare = (kind.removeprefix("response.").removeprefix("unisono:") for kind in types)
    openai = (kind.replace("reasoning.", "reasoning_text.") for kind in bare)
    return [kind for kind, _ in groupby(openai)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_events_come_in_the_order_of_the_catalogue_and_fold_to_what_is_kept(talk: Line, case: Case) -> None:
    talk.say(case.output, faults=case.faults)
    made = await talk.streamed(**case.asked)
    items = [["output_item.added", *life, "output_item.done"] for life in case.lives]
    told = [kind for life in items for kind in life] + (["error"] if case.last == "failed" else [])
    assert stems(made.types) == ["created", "in_progress", *told, case.last]
    assert made.last["status"] == case.last
    assert json.dumps(await talk.kept(made.last)) == json.dumps(made.last)
    assert {key for key in made.last if key != "unisono"} == set(made.events[0]["response"])
    assert made.events[0]["response"] | {"unisono": 0} == made.last | {
        key: made.events[0]["response"][key]
        for key in ("status", "output", "usage", "error", "completed_at", "incomplete_details")
    } | {"unisono": 0}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.faults])
async def test_the_whole_answer_is_the_stream_under_other_ids(talk: Line, name: str) -> None:
    case = CASES[name]
    talk.say(case.output)
    told = (await talk.streamed(**case.asked)).last
    talk.say(case.output)
    whole = await talk.whole(**case.asked)
    assert nameless(whole) == nameless(told)
    assert json.dumps(await talk.kept(whole)) == json.dumps(whole)


def nameless(response: Json) -> Json:
    """A response without what is new every time."""
    bare = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": bare}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_repair_is_told_at_the_end_and_kept(talk: Line, stream: bool) -> None:
    talk.say("<|channel|>analysis<|message|>Hm.<|return|>", "ok<|return|>")
    answer = await talk.post(stream=stream)
    response = answer.events[-1]["response"] if stream else answer.body
    assert text_of(response) == "ok"
    assert "analysis-only" in response["unisono"]["recoveries"]
    header = answer.headers.get("x-unisono-recoveries")
    assert header is None if stream else header == ",".join(response["unisono"]["recoveries"])
    assert answer.headers["x-unisono-backend"] == response["unisono"]["backend"] == f"{talk.wire.name}-1"
    assert (await talk.kept(response))["unisono"] == response["unisono"]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("at", range(16))
async def test_a_stream_that_breaks_anywhere_has_one_end(talk: Line, at: int) -> None:
    talk.say(PREAMBLE + LOOK, faults=(reset_at(at),))
    answer = await talk.post(stream=True, tools=[TOOL])
    if answer.status == 200:
        assert [event["type"] for event in answer.events[-2:]] == ["error", "response.failed"]
        assert answer.done
        told = answer.events[-1]["response"]
        assert told["error"] == {"code": "server_error", "message": answer_error(answer.events[-2])["message"]}
        assert await talk.kept(told) == told
    else:
        refusal(answer, 502)
        assert not answer.headers["content-type"].startswith("text/event-stream")


def answer_error(event: Json) -> Json:
    """An error event's fields, which one dialect nests."""
    return dict(event.get("error") or event)


async def test_what_went_wrong_before_anything_was_shown_is_an_http_error_and_not_kept(talk: Line) -> None:
    here = Line(talk.wire, talk.fake, talk.gateway)
    conversation = await here.conversation()
    for stream in (False, True):
        talk.say(ANSWER, faults=(reset_at(0),))
        refusal(await talk.post(stream=stream, conversation=conversation), 502, code="backend_protocol_error")
        assert await here.items(conversation) == []


async def test_the_dialects_differ_where_they_must(site: Line) -> None:
    tools = [CUSTOM, {"type": "web_search"}]
    made: dict[str, Any] = {}
    for name, root in DIALECTS.items():
        here = Line(site.wire, site.fake, site.gateway, root)
        site.say(THOUGHT + RUN)
        made[name] = await here.streamed(tools=tools)
    assert {"response.reasoning_text.delta", "response.custom_tool_call_input.done"} < set(made["openai"].types)
    other = set(made["open-responses"].types)
    assert {"response.reasoning.delta", "unisono:custom_tool_call_input.done"} < other
    assert [item["type"] for item in made["openai"].last["output"]] == ["reasoning", "custom_tool_call"]
    assert [item["type"] for item in made["open-responses"].last["output"]] == ["reasoning", "unisono:custom_tool_call"]
    assert [tool["type"] for tool in made["open-responses"].last["tools"]] == ["unisono:custom", "unisono:web_search"]
    # What is kept belongs to no dialect: each shows it its own way.
    kept = await site.kept(made["open-responses"].last)
    assert [item["type"] for item in kept["output"]] == ["reasoning", "custom_tool_call"]
    site.say(OK[:-10] + " and so on", faults=(reset_at(5),))
    flat = (await site.streamed()).events[-2]
    assert set(flat) == {"type", "sequence_number", "code", "message", "param"}
    site.say(OK[:-10] + " and so on", faults=(reset_at(5),))
    nested = (await Line(site.wire, site.fake, site.gateway, "/open-responses/v1").streamed()).events[-2]
    assert set(nested) == {"type", "sequence_number", "error"}
    assert set(nested["error"]) == {"type", "code", "message", "param"}


@pytest.mark.parametrize("root", ROOTS)
async def test_every_prefix_serves_the_whole_surface(site: Line, root: str) -> None:
    here = Line(site.wire, site.fake, site.gateway, root)
    here.say(ANSWER)
    for stream in (False, True):
        response = await here.responds(stream=stream)
        one = f"/responses/{response['id']}"
        assert (await here.get(one)).body == response
        assert (await here.get(f"{one}/input_items")).body["data"][0]["content"][0]["text"] == "Hi"
        refusal(await here.made(f"{one}/cancel"), 400, "response_id")
        refusal(await here.get(f"{one}?stream=true"), 400, "stream")
        async with here.gateway.session.delete(f"{here.gateway.url}{root}{one}") as gone:
            assert await gone.json() == {"id": response["id"], "object": "response", "deleted": True}
        refusal(await here.get(one), 404, "response_id")
        refusal(await here.post(stream=stream, previous_response_id=response["id"]), 404, "previous_response_id")
        refusal(await here.post(stream=stream, model="nobody"), 404, "model", "model_not_found")
        refusal(await here.post(stream=stream, temperature=9), 400, "temperature")
    assert (await here.post("/input_tokens")).body["input_tokens"] > 10


async def test_usage_is_what_was_said(site: Line) -> None:
    site.say(ANSWER)
    usage = (await site.whole())["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 2
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens"] == (await site.post("/input_tokens")).body["input_tokens"]
    assert set(usage["input_tokens_details"]) == {"cached_tokens", "cache_write_tokens"}
