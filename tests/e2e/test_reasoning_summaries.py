"""Reasoning summaries of the Responses API, in every way to read a response."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.api.responses.folding import fold
from tests.e2e.gateway import gateway
from tests.e2e.replicas import Client, Told
from tests.e2e.responses import OK, Json, Line
from tests.e2e.test_responses_websocket import connected
from tests.e2e.wires import WIRES, deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = "It is " + "very " * 130 + "long."
LATER = " ".join(f"Then comes step {number}." for number in range(60))
THOUGHT = f"We add 2 and 2, i.e. 4. {LONG} So the answer is 4.\nNow write"
OUTPUT = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant" + OK
SUMMARY = "We add 2 and 2, i.e. 4. So the answer is 4.\nNow write"
PARTS = [{"type": "summary_text", "text": SUMMARY}]
AUTO: Json = {"reasoning": {"summary": "auto"}}
ROOTS = ("/v1", "/open-responses/v1")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Line]:
    wire = WIRES["vllm"]
    async with wire.fake() as fake:
        hidden = {**deployment("gpt-oss-hidden", wire, fake), "unisono": {"reasoning_field": "none"}}
        async with gateway({"model_list": [deployment("gpt-oss", wire, fake), hidden]}) as running:
            yield Line(wire, fake, running)


@pytest.fixture(params=ROOTS)
def harness(site: Line, request: pytest.FixtureRequest) -> Line:
    site.say(OUTPUT.format(THOUGHT))
    return Line(site.wire, site.fake, site.gateway, request.param)


def summary_of(response: Json) -> list[Json]:
    return list(response["output"][0]["summary"])


async def test_streamed_whole_and_stored_summaries_are_equal(harness: Line) -> None:
    stream = await harness.streamed(**AUTO)
    whole = await harness.whole(**AUTO)
    assert summary_of(stream.last) == summary_of(whole) == PARTS
    assert whole["reasoning"]["summary"] == "auto"
    assert "notes" not in whole["unisono"]
    assert summary_of(await harness.kept(stream.last)) == PARTS
    assert json.dumps(await harness.kept(whole)) == json.dumps(whole)
    deltas = [event["delta"] for event in stream.events if event["type"] == "response.reasoning_summary_text.delta"]
    assert len(deltas) == 3


async def test_a_background_summary_can_be_resumed_at_any_event(harness: Line) -> None:
    client = Client(harness.gateway.url, harness.gateway.session)
    body = {"model": "gpt-oss", "input": "Hi", "background": True, "stream": True, **AUTO}
    whole = await client.listens(Told(), f"{harness.root}/responses", body)
    response = fold(whole.events).response
    assert summary_of(response) == PARTS
    for number in range(len(whole.events) - 1):
        path = f"{harness.root}/responses/{response['id']}?stream=true&starting_after={number}"
        assert (await client.listens(Told(), path)).events == whole.events[number + 1 :]


async def test_a_summary_is_sent_over_a_websocket(harness: Line) -> None:
    async with connected(harness.gateway, f"{harness.root}/responses") as client:
        await client.send(**AUTO)
        assert summary_of(await client.answer()) == PARTS


KINDS: dict[str, tuple[Json, int]] = {
    # case: (`reasoning`, maximum length of the summary)
    "not requested": ({"effort": "low"}, 0),
    "none": ({"summary": "none"}, 0),
    "null": ({"summary": None}, 0),
    "auto": ({"summary": "auto"}, 600),
    "concise": ({"summary": "concise"}, 600),
    "detailed": ({"summary": "detailed"}, 2_400),
    "deprecated name": ({"generate_summary": "auto"}, 600),
    "both names": ({"generate_summary": "detailed", "summary": "concise"}, 600),
}


@pytest.mark.parametrize(("reasoning", "limit"), KINDS.values(), ids=KINDS)
async def test_the_requested_kind_limits_the_summary(site: Line, reasoning: Json, limit: int) -> None:
    site.say(OUTPUT.format(LATER))
    response = await site.whole(reasoning=reasoning)
    text = "".join(part["text"] for part in summary_of(response))
    assert (limit - 30 < len(text) <= limit or text == LATER) if limit else text == ""
    assert LATER.startswith(text)
    assert text.endswith(("", ".")[bool(limit)])
    echoed = reasoning.get("summary") or reasoning.get("generate_summary")
    assert response["reasoning"]["summary"] == (None if echoed == "none" else echoed)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_hidden_reasoning_has_no_summary(harness: Line, stream: bool) -> None:
    fields = {"model": "gpt-oss-hidden", "include": ["reasoning.encrypted_content"], **AUTO}
    answer = await harness.post(stream=stream, **fields)
    assert b"We add" not in answer.raw
    assert b"summary_text" not in answer.raw
    response = answer.events[-1]["response"] if stream else answer.body
    assert summary_of(response) == []
    assert response["unisono"]["notes"] == ["reasoning.summary: no effect, because this model hides its reasoning"]


async def test_a_summary_sent_back_does_not_change_the_prompt(site: Line) -> None:
    site.say(OUTPUT.format(THOUGHT))
    response = await site.whole(**AUTO)
    question: Json = {"role": "user", "content": "Hi"}
    more: Json = {"role": "user", "content": "Go on"}
    await site.whole(previous_response_id=response["id"], input=[more])
    continued = site.tokens[-1]
    again = await site.whole(input=[question, *response["output"], more])
    assert site.tokens[-1] == continued
    assert "notes" not in again["unisono"]
