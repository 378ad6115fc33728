"""Forced tools, JSON answers and reasoning budgets, combined with other request options.

The options are several choices, stop strings, small token limits, the background and WebSocket.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.obeying import ENCODING, KINDS, SURFACES, Desk, answers, desk, of_responses
from tests.e2e.test_forced_tools import CITY, PARIS, TOOLS, WEATHER
from tests.e2e.test_responses_websocket import connected

RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
REQUESTS: dict[str, dict[str, Any]] = {
    "named tool": {"tools": TOOLS, "tool_choice": WEATHER},
    "required tool": {"tools": TOOLS, "tool_choice": "required"},
    "JSON": {"response_format": RESPONSE_FORMAT},
}
ANSWER = answers("It rains.")

pytestmark = pytest.mark.asyncio(loop_scope="module")
both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
on_every_surface = pytest.mark.parametrize("ask", SURFACES.values(), ids=SURFACES)
every_request = pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "vllm, unguided", "ollama"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    async with desk(KINDS[request.param]) as running:
        yield running


def content_of(outcome: Any) -> str:
    """Return the requested content: the arguments of the only call, or the answer."""
    assert outcome.unmet == ""
    if outcome.calls:
        [(name, arguments)] = outcome.calls
        assert name == "get_weather"
        return str(arguments)
    return str(outcome.text)


@pytest.mark.sampled(one_in=8)
@both_forms
@every_request
async def test_every_choice_has_the_requested_form(harness: Desk, fields: Any, stream: bool) -> None:
    harness.think(ANSWER, bodies=[PARIS], name="get_weather")
    answer = await harness.gateway.chat(stream=stream, n=3, **fields)
    assert answer.status == 200
    contents = {0: "", 1: "", 2: ""}
    for body in answer.events if stream else [answer.body]:
        for choice in body["choices"]:
            message = choice["delta" if stream else "message"]
            contents[choice["index"]] += message.get("content") or ""
            contents[choice["index"]] += "".join(
                call["function"]["arguments"] for call in message.get("tool_calls") or ()
            )
    assert contents == dict.fromkeys(contents, PARIS)


@both_forms
@every_request
async def test_reasoning_does_not_match_stop_strings(harness: Desk, fields: Any, stream: bool) -> None:
    harness.think(ANSWER, bodies=[PARIS], name="get_weather")
    outcome = await SURFACES["chat"](harness, stream=stream, stop=["Hm"], **fields)
    assert content_of(outcome) == PARIS


@pytest.mark.sampled(one_in=12)
@both_forms
@on_every_surface
@every_request
async def test_token_limit_truncates_a_forced_answer_without_a_substitute(
    harness: Desk, ask: Any, fields: Any, stream: bool
) -> None:
    whole = len(ENCODING.encode_marked(ANSWER)) + 30
    min_tokens = 16 if ask is SURFACES["responses"] else 1
    limit = "max_output_tokens" if ask is SURFACES["responses"] else "max_tokens"
    for max_tokens in range(min_tokens, whole, 3):
        harness.think(ANSWER, bodies=[PARIS], name="get_weather")
        outcome = await ask(harness, stream=stream, **fields, **{limit: max_tokens})
        assert outcome.refusal == ""
        if outcome.finish in ("length", "incomplete"):
            assert outcome.calls == []
            # A truncated answer is reported as far as it was generated.
            assert PARIS.startswith(outcome.text) or "It rains.".startswith(outcome.text)
            assert harness.kind.guided or fields is REQUESTS["JSON"] or outcome.text == ""
            assert outcome.unmet
        else:
            assert content_of(outcome) == PARIS


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("budget", [0, 1, 10**6])
@pytest.mark.parametrize(
    "fields", [{}, {"tools": TOOLS}, *REQUESTS.values()], ids=["no tools", "optional tools", *REQUESTS]
)
async def test_reasoning_budget_is_kept_with_every_answer_form(harness: Desk, fields: Any, budget: int) -> None:
    model = harness.think(ANSWER, bodies=[PARIS], name="get_weather")
    # After the end of its reasoning, the model answers where it has a choice.
    outcome = await SURFACES["chat"](harness, stream=False, reasoning={"max_tokens": budget}, **fields)
    assert outcome.finish in ("stop", "tool_calls")
    assert outcome.unmet == ""
    thoughts = outcome.whole["choices"][0]["message"].get("reasoning") or ""
    assert len(ENCODING.encode_text(thoughts)) <= budget
    assert len(model.asked) <= 4


@both_forms
@on_every_surface
async def test_truncated_json_under_a_grammar_is_regenerated_or_marked_unmet(
    harness: Desk, ask: Any, stream: bool
) -> None:
    if not harness.kind.guided or harness.kind.name != "vllm":
        pytest.skip("a JSON grammar of this backend allows no markers within strings")
    # A JSON grammar allows markers within strings.
    model = harness.think(ANSWER, bodies=['{"city":"Pa<|end|>', PARIS])
    outcome = await ask(harness, stream=stream, response_format=RESPONSE_FORMAT)
    if not stream:
        assert content_of(outcome) == PARIS
        assert "regenerated-answer" in outcome.note["recoveries"]
        assert len(model.asked) == 3
    else:
        # In Messages, the stop reason marks the refusal.
        assert outcome.text + outcome.refusal == '{"city":"Pa'
        assert outcome.unmet


@every_request
async def test_background_response_has_the_requested_form(harness: Desk, fields: Any) -> None:
    harness.think(ANSWER, bodies=[PARIS], name="get_weather")
    body = {"model": "gpt-oss", "input": "Hi", "background": True, **of_responses(fields)}
    answer = await harness.gateway.post("/v1/responses", json.dumps(body).encode())
    assert answer.status == 200, answer.raw
    response = answer.body
    async with asyncio.timeout(20):
        while response["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.05)
            response = (await harness.gateway.get(f"/v1/responses/{response['id']}")).body
    check_response(response)


@every_request
async def test_websocket_response_has_the_requested_form(harness: Desk, fields: Any) -> None:
    harness.think(ANSWER, bodies=[PARIS], name="get_weather")
    async with connected(harness.gateway) as client:
        await client.send(**of_responses(fields))
        check_response(await client.answer())


def check_response(response: Any) -> None:
    assert response["status"] == "completed"
    assert "unmet" not in response["unisono"]
    last = response["output"][-1]
    assert (last["arguments"] if last["type"] == "function_call" else last["content"][0]["text"]) == PARIS
