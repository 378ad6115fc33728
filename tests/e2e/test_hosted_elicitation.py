"""Questions of tools to the user: they end a response, and the answer continues the call in the next one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import config_of, gateway, message_of
from tests.e2e.hosting import calls, desk, hosts, made, result
from tests.e2e.responses import ANSWER, OK, Json, Line, kinds, refusal
from tests.fakes import FakeVllm, VllmScript
from tests.mcp.conftest import Upstream
from unisono.harmony.encoding import load_encoding

BOTH_FORMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
WAYS = pytest.mark.parametrize("way", ["modern", "legacy"])
TRIP = {"day": "Monday", "seats": 2}
ENCODING = load_encoding()


@pytest.fixture
async def harness(upstream: Upstream) -> AsyncIterator[Line]:
    async with desk(upstream) as found:
        yield found


def answered(request: Json, action: str = "accept", content: Any = TRIP, **more: Any) -> Json:
    more |= {} if content is None else {"content": content}
    return {"type": "mcp_elicitation_response", "elicitation_request_id": request["id"], "action": action, **more}


async def asked(harness: Line, tool: str = "book", *, stream: bool = False, **fields: Any) -> tuple[Json, Json]:
    """Create a response that ends with a question; return both."""
    city = fields.pop("city", "Oslo")
    harness.say(calls(tool, city=city))
    response = await harness.responds(stream=stream, **fields)
    assert response["status"] == "completed"
    [request] = made(response, "mcp_elicitation_request")
    return response, request


@BOTH_FORMS
@WAYS
async def test_the_answer_continues_the_call(upstream: Upstream, way: str, stream: bool) -> None:
    city = f"Oslo {way} {stream}"
    async with desk(upstream, entry={"url": upstream.urls[way]}) as harness:
        first, request = await asked(harness, stream=stream, city=city)
        assert kinds(first["output"]) == ["mcp_list_tools", "reasoning", "mcp_call", "mcp_elicitation_request"]
        assert (request["server_label"], request["name"], request["mode"]) == ("docs", "book", "form")
        assert request["message"] == f"When do you travel to {city}?"
        assert set(request["requested_schema"]["properties"]) == {"day", "seats"}
        [waiting] = made(first)
        assert (waiting["status"], waiting["error"]) == ("completed", None)
        prompt = harness.tokens[-1]
        harness.say(ANSWER)
        second = await harness.responds(stream=stream, previous_response_id=first["id"], input=[answered(request)])
        assert kinds(second["output"]) == ["mcp_call", "reasoning", "message"]
        [call] = made(second)
        assert call["output"] == f"booked {city} on Monday for 2"
        # An older server asks while the call runs. That call is cancelled, and a new one has the answer.
        cancelled = [f"book {city} cancel"] if way == "legacy" else []
        assert upstream.noted(f"book {city} ") == [*cancelled, f"book {city} Monday 2"]
        # The turn continues: the new prompt extends the old one.
        assert harness.tokens[-1][: len(prompt)] == prompt
        repeated = "<|start|>assistant" + calls("book", "", city=city)
        assert harness.said.endswith(result("book", waiting["output"]) + repeated + result("book", call["output"]))
        harness.say(OK)
        third = await harness.responds(stream=stream, previous_response_id=second["id"], input="Thanks")
        assert third["status"] == "completed"


@BOTH_FORMS
async def test_without_stored_state_the_client_sends_the_question_back(harness: Line, stream: bool) -> None:
    first, request = await asked(harness, stream=stream, store=False, city="Kiel")
    harness.say(ANSWER)
    history = [{"role": "user", "content": "Go"}, *first["output"], answered(request)]
    second = await harness.responds(stream=stream, store=False, input=history)
    [call] = made(second)
    assert call["output"] == "booked Kiel on Monday for 2"


async def test_the_repeated_call_can_be_referred_to(harness: Line) -> None:
    first, request = await asked(harness, city="Metz")
    harness.say(ANSWER)
    second = await harness.whole(previous_response_id=first["id"], input=[answered(request)])
    references = [{"type": "item_reference", "id": item["id"]} for item in (*first["output"][1:], *second["output"])]
    harness.say(OK)
    items = [{"role": "user", "content": "Go"}, *references, {"role": "user", "content": "Thanks"}]
    third = await harness.whole(input=items)
    assert third["status"] == "completed"
    assert "notes" not in third["unisono"]
    assert result("book", "booked Metz on Monday for 2") in harness.said


async def test_in_a_conversation(harness: Line) -> None:
    conversation = await harness.conversation()
    _, request = await asked(harness, conversation=conversation, city="Linz")
    harness.say(ANSWER)
    second = await harness.whole(conversation=conversation, input=[answered(request)])
    [call] = made(second)
    assert call["output"] == "booked Linz on Monday for 2"


@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_the_tool_learns_that_the_user_does_not_answer(harness: Line, action: str) -> None:
    first, request = await asked(harness, city="Rome")
    harness.say(ANSWER)
    second = await harness.whole(previous_response_id=first["id"], input=[answered(request, action, None)])
    [call] = made(second)
    assert call["output"] == f"not booked: {action}"


@BOTH_FORMS
async def test_a_second_question_ends_the_next_response_without_an_answer_of_the_model(
    harness: Line, upstream: Upstream, stream: bool
) -> None:
    city = f"Bern {stream}"
    first, request = await asked(harness, "upgrade", stream=stream, city=city)
    answers = {"When": TRIP, "First": {"first": True}}
    answer = answered(request, content=answers[request["message"].split()[0]])
    number = len(harness.prompts)
    second = await harness.responds(stream=stream, previous_response_id=first["id"], input=[answer])
    assert kinds(second["output"]) == ["mcp_call", "mcp_elicitation_request"]
    assert second["status"] == "completed"
    assert len(harness.prompts) == number
    [request] = made(second, "mcp_elicitation_request")
    harness.say(ANSWER)
    answer = answered(request, content=answers[request["message"].split()[0]])
    third = await harness.responds(stream=stream, previous_response_id=second["id"], input=[answer])
    [call] = made(third)
    assert call["output"] == f"{city} on Monday, first class: True"
    assert len(upstream.noted(f"upgrade {city} Monday True")) == 1


async def test_the_user_is_sent_to_a_page(upstream: Upstream) -> None:
    async with desk(upstream, entry={"url": upstream.urls["legacy"]}) as harness:
        harness.say(calls("files", name="me"))
        first = await harness.whole()
        [request] = made(first, "mcp_elicitation_request")
        assert (request["mode"], request["url"]) == ("url", "https://sign-in.example.com/me")
        Path(upstream.notes.parent / "signed-in-me").touch()
        harness.say(ANSWER)
        second = await harness.whole(previous_response_id=first["id"], input=[answered(request, content=None)])
        [call] = made(second)
        assert call["output"] == "files of me"


async def test_an_unanswered_question_does_not_stop_the_conversation(harness: Line) -> None:
    first, _ = await asked(harness, city="Nice")
    harness.say(ANSWER)
    second = await harness.whole(previous_response_id=first["id"], input="Never mind.")
    assert second["status"] == "completed"
    assert "The user did not answer the question of the tool." in harness.said


async def test_an_answer_is_used_once(harness: Line, upstream: Upstream) -> None:
    first, request = await asked(harness, city="Pisa")
    harness.say(ANSWER)
    again = {"previous_response_id": first["id"], "input": [answered(request)]}
    await harness.whole(**again)
    refusal(await harness.post(**again), 409, "input.0.elicitation_request_id", "approval_used")
    assert len(upstream.noted("book Pisa")) == 1


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("answer", "status", "param"),
    [
        ({"content": {"day": "Monday"}}, 400, "input.0.content"),
        ({"content": {"day": "Monday", "seats": 12}}, 400, "input.0.content"),
        ({"content": {"day": 7, "seats": 1}}, 400, "input.0.content"),
        ({"content": None}, 400, "input.0.content"),
        ({"action": "maybe"}, 400, "input.0.action"),
        ({"elicitation_request_id": "mcpe_unknown"}, 404, "input.0.elicitation_request_id"),
        ({"elicitation_request_id": ""}, 400, "input.0.elicitation_request_id"),
    ],
)
async def test_a_wrong_answer_is_refused_and_can_be_corrected(
    harness: Line, upstream: Upstream, answer: Json, status: int, param: str
) -> None:
    city = f"Turin {param} {json.dumps(answer)}"
    first, request = await asked(harness, city=city)
    wrong = {**answered(request), **answer}
    refusal(await harness.post(previous_response_id=first["id"], input=[wrong]), status, param)
    assert upstream.noted(city) == []
    harness.say(ANSWER)
    second = await harness.whole(previous_response_id=first["id"], input=[answered(request)])
    assert made(second)[0]["output"].startswith("booked")


async def test_a_question_is_not_an_approval(harness: Line) -> None:
    first, request = await asked(harness, city="Genoa")
    approval = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    answer = await harness.post(previous_response_id=first["id"], input=[approval])
    assert "mcp_elicitation_response" in refusal(answer, 400, "input.0.approval_request_id")


async def test_a_server_of_the_operator_may_be_silenced(upstream: Upstream) -> None:
    async with desk(upstream, entry={"elicitation": "deny"}) as harness:
        harness.say(calls("book", city="Graz"), ANSWER)
        response = await harness.whole()
        assert kinds(response["output"])[-2:] == ["reasoning", "message"]
        [call] = made(response)
        assert call["status"] == "failed"


@WAYS
@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_apis_without_questions_tell_the_model(upstream: Upstream, way: str, api: str) -> None:
    outputs = [calls("book", city=f"Ulm {way} {api}"), ANSWER]
    async with FakeVllm(script=lambda _: VllmScript(tokens=ENCODING.encode_marked(outputs.pop(0)))) as fake:
        config = {**config_of(f"vllm@{fake.url}"), **hosts(upstream, way)}
        async with gateway(config) as server:
            answer = await getattr(server, api)(unisono={"run_tools": True})
            assert answer.status == 200, answer.raw
            if api == "chat":
                assert message_of(answer).finish_reason == "stop"
        prompt = ENCODING.decode(fake.requests[-1].json["prompt"])
    assert f"which cannot be passed on here: When do you travel to Ulm {way} {api}?]" in prompt


async def test_the_question_is_stored(harness: Line) -> None:
    first, request = await asked(harness, stream=True, city="Basel")
    stored = await harness.kept(first)
    assert stored["output"][-1] == request


async def test_a_background_response_ends_with_the_question_and_is_streamed_again(harness: Line) -> None:
    harness.say(calls("book", city="Graz"))
    answer = await harness.post(background=True, stream=True)
    first = answer.events[-1]["response"]
    [request] = made(first, "mcp_elicitation_request")
    again = await harness.get(f"/responses/{first['id']}?stream=true")
    assert again.events[-1]["response"]["output"][-1] == request
    harness.say(ANSWER)
    second = await harness.whole(previous_response_id=first["id"], input=[answered(request)])
    assert made(second)[0]["output"] == "booked Graz on Monday for 2"
