"""Forced tools, JSON answers and budgets beside everything else a request may ask for: several choices, stop strings,
too little room, the background, WebSocket."""

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

FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
ASKED: dict[str, dict[str, Any]] = {
    "a named tool": {"tools": TOOLS, "tool_choice": WEATHER},
    "any tool": {"tools": TOOLS, "tool_choice": "required"},
    "JSON": {"response_format": FORM},
}
SAYS = answers("It rains.")

pytestmark = pytest.mark.asyncio(loop_scope="module")
both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
on_both = pytest.mark.parametrize("ask", SURFACES.values(), ids=SURFACES)
whatever_is_asked = pytest.mark.parametrize("fields", ASKED.values(), ids=ASKED)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "vllm, unguided", "ollama"])
async def here(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    async with desk(KINDS[request.param]) as running:
        yield running


def had(outcome: Any) -> str:
    """What was asked for: the arguments of the one call, or the answer."""
    assert outcome.unmet == ""
    if outcome.calls:
        [(name, arguments)] = outcome.calls
        assert name == "get_weather"
        return str(arguments)
    return str(outcome.text)


@both_forms
@whatever_is_asked
async def test_each_of_several_choices_is_as_it_was_asked_for(here: Desk, fields: Any, stream: bool) -> None:
    here.think(SAYS, bodies=[PARIS], name="get_weather")
    answer = await here.gateway.chat(stream=stream, n=3, **fields)
    assert answer.status == 200
    said = {0: "", 1: "", 2: ""}
    for body in answer.events if stream else [answer.body]:
        for choice in body["choices"]:
            told = choice["delta" if stream else "message"]
            said[choice["index"]] += told.get("content") or ""
            said[choice["index"]] += "".join(call["function"]["arguments"] for call in told.get("tool_calls") or ())
    assert said == dict.fromkeys(said, PARIS)


@both_forms
@whatever_is_asked
async def test_thoughts_stop_at_no_stop_string(here: Desk, fields: Any, stream: bool) -> None:
    here.think(SAYS, bodies=[PARIS], name="get_weather")
    outcome = await SURFACES["chat"](here, stream=stream, stop=["Hm"], **fields)
    assert had(outcome) == PARIS


@pytest.mark.sampled(one_in=4)
@both_forms
@on_both
@whatever_is_asked
async def test_with_too_little_room_there_is_less_and_never_anything_else(
    here: Desk, ask: Any, fields: Any, stream: bool
) -> None:
    whole = len(ENCODING.encode_marked(SAYS)) + 30
    least = 16 if ask is SURFACES["responses"] else 1
    limit = "max_output_tokens" if ask is SURFACES["responses"] else "max_tokens"
    for most in range(least, whole, 3):
        here.think(SAYS, bodies=[PARIS], name="get_weather")
        outcome = await ask(here, stream=stream, **fields, **{limit: most})
        assert outcome.refusal == ""
        if outcome.finish in ("length", "incomplete"):
            assert outcome.calls == []
            # What is cut is told as far as it came, whatever it would have become.
            assert PARIS.startswith(outcome.text) or "It rains.".startswith(outcome.text)
            assert here.kind.guided or fields is ASKED["JSON"] or outcome.text == ""
            assert outcome.unmet
        else:
            assert had(outcome) == PARIS


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("budget", [0, 1, 10**6])
@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}, *ASKED.values()], ids=["nothing", "tools", *ASKED])
async def test_a_budget_for_thoughts_is_kept_beside_everything(here: Desk, fields: Any, budget: int) -> None:
    model = here.think(SAYS, bodies=[PARIS], name="get_weather")
    # Behind the end of a thought the model answers, where it may choose.
    outcome = await SURFACES["chat"](here, stream=False, reasoning={"max_tokens": budget}, **fields)
    assert outcome.finish in ("stop", "tool_calls")
    assert outcome.unmet == ""
    thoughts = outcome.whole["choices"][0]["message"].get("reasoning") or ""
    assert len(ENCODING.encode_text(thoughts)) <= budget
    assert len(model.asked) <= 4


@both_forms
@on_both
async def test_what_breaks_off_under_a_grammar_is_not_passed_off_as_json(here: Desk, ask: Any, stream: bool) -> None:
    if not here.kind.guided or here.kind.name != "vllm":
        return
    # A grammar of JSON lets markers into strings.
    model = here.think(SAYS, bodies=['{"city":"Pa<|end|>', PARIS])
    outcome = await ask(here, stream=stream, response_format=FORM)
    if not stream:
        assert had(outcome) == PARIS
        assert "regenerated-answer" in outcome.note["recoveries"]
        assert len(model.asked) == 3
    else:
        # Of Messages the stop reason says that it is none.
        assert outcome.text + outcome.refusal == '{"city":"Pa'
        assert outcome.unmet


@whatever_is_asked
async def test_the_background_answers_as_it_was_asked(here: Desk, fields: Any) -> None:
    here.think(SAYS, bodies=[PARIS], name="get_weather")
    body = {"model": "gpt-oss", "input": "Hi", "background": True, **of_responses(fields)}
    answer = await here.gateway.post("/v1/responses", json.dumps(body).encode())
    assert answer.status == 200, answer.raw
    response = answer.body
    async with asyncio.timeout(20):
        while response["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.05)
            response = (await here.gateway.get(f"/v1/responses/{response['id']}")).body
    check_response(response)


@whatever_is_asked
async def test_a_socket_answers_as_it_was_asked(here: Desk, fields: Any) -> None:
    here.think(SAYS, bodies=[PARIS], name="get_weather")
    async with connected(here.gateway) as client:
        await client.send(**of_responses(fields))
        check_response(await client.answer())


def check_response(response: Any) -> None:
    assert response["status"] == "completed"
    assert "unmet" not in response["unisono"]
    last = response["output"][-1]
    assert (last["arguments"] if last["type"] == "function_call" else last["content"][0]["text"]) == PARIS
