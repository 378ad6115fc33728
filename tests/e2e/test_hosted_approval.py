"""Calls that somebody has to approve: asked for in one response, decided with the next one, whichever way that
continues and whichever gateway it reaches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.contract.servers import Server
from tests.e2e.hosting import DOCS, calls, desk, made, result
from tests.e2e.responses import ANSWER, OK, THOUGHT, Json, Line, kinds, refusal, text_of
from tests.e2e.wires import WIRES
from tests.mcp.conftest import Upstream, start_upstream

DENIED = "The user did not approve this call."


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with start_upstream(tmp_path_factory.mktemp("upstream")) as (_, found):
        yield found


def asking(upstream: Upstream, sections: Json) -> AbstractAsyncContextManager[Line]:
    """A gateway on which every call has to be approved."""
    return desk(upstream, entry={"require_approval": "always"}, **sections)


@pytest.fixture
async def here(upstream: Upstream) -> AsyncIterator[Line]:
    async with asking(upstream, {}) as found:
        yield found


@pytest.fixture
async def free(upstream: Upstream) -> AsyncIterator[Line]:
    """The same, where the backend keeps to no constraint: it says what a test has it say."""
    async with desk(upstream, WIRES["mlx_server"], entry={"require_approval": "always"}) as found:
        yield found


def decided(request: Json, approve: bool, **more: Any) -> Json:
    return {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": approve, **more}


async def asked_for(here: Line, text: str, *, stream: bool = False, **fields: Any) -> tuple[Json, Json]:
    """A response that ends with a request for approval, and that."""
    here.say(calls("echo", text=text))
    response = await here.responds(stream=stream, **fields)
    assert response["status"] == "completed"
    [request] = made(response, "mcp_approval_request")
    return response, request


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_approved_call_is_made_and_stands_where_it_was_asked_for(
    here: Line, upstream: Upstream, stream: bool
) -> None:
    text = f"approved {stream}"
    first, request = await asked_for(here, text, stream=stream)
    assert kinds(first["output"]) == ["mcp_list_tools", "reasoning", "mcp_approval_request"]
    assert (request["name"], request["server_label"]) == ("echo", "docs")
    assert upstream.noted(text) == []
    asked = here.tokens[-1]
    here.say(ANSWER)
    second = await here.responds(stream=stream, previous_response_id=first["id"], input=[decided(request, True)])
    assert kinds(second["output"]) == ["mcp_call", "reasoning", "message"]
    [call] = made(second)
    assert (call["output"], call["approval_request_id"]) == (text, request["id"])
    assert upstream.noted(text) == [f"echo {text}"]
    # The turn goes on, so its thoughts stay: what was asked before is the beginning of what is asked now.
    assert here.tokens[-1][: len(asked)] == asked
    assert here.said.endswith(calls("echo", text=text) + result("echo", text))
    here.say(OK)
    await here.whole(previous_response_id=second["id"], input="Thanks")
    assert calls("echo", "", text=text) + result("echo", text) in here.said


FORCED: dict[str, Any] = {
    "any tool": "required",
    "any of the server": {"type": "mcp", "server_label": "docs"},
    "this one": {"type": "mcp", "server_label": "docs", "name": "echo"},
}


@pytest.mark.slow
@pytest.mark.parametrize("choice", FORCED.values(), ids=FORCED)
@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
async def test_an_approved_call_is_the_one_that_had_to_be_made(free: Line, choice: Any, background: bool) -> None:
    first, request = await asked_for(free, "has to be", tool_choice=choice)
    free.say(ANSWER)
    fields = {"previous_response_id": first["id"], "input": [decided(request, True)], "tool_choice": choice}
    second = (await free.streamed(background=True, **fields)).last if background else await free.whole(**fields)
    assert kinds(second["output"]) == ["mcp_call", "reasoning", "message"]
    assert "unmet" not in second["unisono"]


@pytest.mark.parametrize("approve", [True, False], ids=["another is approved", "it is denied"])
async def test_a_call_that_was_not_made_still_has_to_be(free: Line, approve: bool) -> None:
    first, request = await asked_for(free, "not it")
    name = "facts" if approve else "echo"
    free.say(calls(name, **({} if approve else {"text": "again"})))
    choice = {"type": "mcp", "server_label": "docs", "name": name}
    answer = [decided(request, approve)]
    second = await free.whole(previous_response_id=first["id"], input=answer, tool_choice=choice)
    assert [each["name"] for each in made(second, "mcp_approval_request")] == [name]
    free.say(ANSWER)
    third = await free.whole(previous_response_id=first["id"], input="And?", tool_choice=choice)
    assert third["unisono"]["unmet"]


async def test_a_call_that_is_not_approved_is_not_made_and_the_model_is_told_why(
    here: Line, upstream: Upstream
) -> None:
    first, request = await asked_for(here, "denied")
    here.say(OK)
    answer = decided(request, False, reason="Too dear.")
    second = await here.whole(previous_response_id=first["id"], input=[answer])
    assert made(second) == []
    assert here.said.endswith(result("echo", f"{DENIED} Too dear."))
    assert upstream.noted("denied") == []
    here.say(OK)
    await here.whole(previous_response_id=second["id"], input="And?")
    assert calls("echo", "", text="denied") + result("echo", f"{DENIED} Too dear.") in here.said


async def test_a_request_that_nobody_answers_is_not_approved(here: Line, upstream: Upstream) -> None:
    first, _ = await asked_for(here, "unanswered")
    here.say(OK)
    second = await here.whole(previous_response_id=first["id"], input="Never mind.")
    assert result("echo", DENIED) + "<|start|>user<|message|>Never mind." in here.said
    assert upstream.noted("unanswered") == []
    here.say(OK)
    await here.whole(previous_response_id=second["id"], input="Really.")
    assert result("echo", DENIED) + "<|start|>user<|message|>Never mind." in here.said


async def test_the_result_stands_behind_its_call_also_where_more_is_said(here: Line) -> None:
    first, request = await asked_for(here, "more")
    here.say(OK)
    more = [decided(request, True), {"role": "user", "content": "And hurry."}]
    second = await here.whole(previous_response_id=first["id"], input=more)
    expected = result("echo", "more") + "<|start|>user<|message|>And hurry."
    assert expected in here.said
    here.say(OK)
    await here.whole(previous_response_id=second["id"], input="Thanks")
    assert expected in here.said


async def test_in_a_conversation(here: Line, upstream: Upstream) -> None:
    conversation = await here.conversation()
    _, request = await asked_for(here, "conversing", conversation=conversation)
    here.say(ANSWER)
    second = await here.whole(conversation=conversation, input=[decided(request, True)])
    assert [call["output"] for call in made(second)] == ["conversing"]
    told = kinds(await here.items(conversation))
    assert told == [
        "message", "mcp_list_tools", "reasoning", "mcp_approval_request",
        "mcp_approval_response", "mcp_call", "reasoning", "message",
    ]  # fmt: skip


async def test_carried_by_the_client_alone(here: Line, upstream: Upstream) -> None:
    first, request = await asked_for(here, "carried", store=False)
    here.say(ANSWER)
    history = [{"role": "user", "content": "Hi"}, *first["output"], decided(request, True)]
    second = await here.whole(input=history, store=False)
    [call] = made(second)
    assert (call["output"], call["approval_request_id"]) == ("carried", request["id"])
    assert kinds(second["output"])[0] == "mcp_call"
    here.say(OK)
    await here.whole(input=[*history, *second["output"], {"role": "user", "content": "Thanks"}], store=False)
    assert here.said.count(result("echo", "carried")) == 1
    assert upstream.noted("carried") == ["echo carried"]


async def test_in_the_background(here: Line, upstream: Upstream) -> None:
    first, request = await asked_for(here, "behind")
    here.say(ANSWER)
    second = await here.streamed(previous_response_id=first["id"], input=[decided(request, True)], background=True)
    assert [call["output"] for call in made(second.last)] == ["behind"]


async def test_on_another_gateway_with_the_same_redis(upstream: Upstream, redis_server: Server) -> None:
    shared = {"store": {"url": redis_server.url, "deadline_s": 5}}
    async with asking(upstream, shared) as one, asking(upstream, shared) as other:
        first, request = await asked_for(one, "elsewhere")
        other.say(ANSWER)
        second = await other.whole(previous_response_id=first["id"], input=[decided(request, True)])
        assert [call["output"] for call in made(second)] == ["elsewhere"]
        assert other.tokens[-1][: len(one.tokens[-1])] == one.tokens[-1]


async def test_several_at_once(here: Line, upstream: Upstream) -> None:
    one, two = (calls("echo", "", text=f"several {number}") for number in (1, 2))
    here.say(THOUGHT + one + "<|start|>assistant" + two)
    first = await here.whole()
    requests = made(first, "mcp_approval_request")
    assert len(requests) == 2
    here.say(ANSWER)
    answers = [decided(requests[0], False), decided(requests[1], True)]
    second = await here.whole(previous_response_id=first["id"], input=answers)
    assert [call["output"] for call in made(second)] == ["several 2"]
    assert upstream.noted("several") == ["echo several 2"]
    assert result("echo", DENIED) in here.said


async def test_a_tool_that_is_not_allowed_any_more_is_not_run(here: Line, upstream: Upstream) -> None:
    first, request = await asked_for(here, "withdrawn")
    here.say(ANSWER)
    tools = [DOCS | {"allowed_tools": ["facts"]}]
    second = await here.whole(previous_response_id=first["id"], input=[decided(request, True)], tools=tools)
    assert [call["status"] for call in made(second)] == ["failed"]
    assert upstream.noted("withdrawn") == []
    assert text_of(second) == "ok"


async def test_a_decision_about_nothing_is_refused(here: Line) -> None:
    first, request = await asked_for(here, "nothing")
    at = "input.0.approval_request_id"
    nowhere = decided(request | {"id": "mcpr_nowhere"}, True)
    continued = {"previous_response_id": first["id"]}
    refusal(await here.post(input=[nowhere], **continued), 404, at)
    # What is not continued is not there, whoever it belongs to.
    refusal(await here.post(input=[decided(request, True)]), 404, at)
    twice = [decided(request, True), decided(request, False)]
    refusal(await here.post(input=twice, **continued), 400, "input.1.approval_request_id")
    here.say(OK)
    second = await here.whole(input=[decided(request, False)], **continued)
    again = await here.post(input=[decided(request, True)], previous_response_id=second["id"])
    refusal(again, 400, at)


WORDS: dict[str, tuple[Any, Any, bool]] = {
    # the operator's word, the request's, whether somebody is asked
    "nobody says anything": (None, None, True),
    "the operator says never": ("never", None, False),
    "the operator says always": ("always", "never", True),
    "the request says never": (None, "never", False),
    "the request says always": ("never", "always", True),
    "the request names it": ("never", {"always": {"tool_names": ["echo"]}}, True),
    "the request spares another": (None, {"never": {"tool_names": ["facts"]}}, True),
    "the request spares it": (None, {"never": {"tool_names": ["echo"]}}, False),
    "the operator spares what reads": ({"never": {"read_only": True}}, None, False),
    "the operator names what reads": ({"always": {"read_only": True}, "otherwise": "never"}, "never", True),
    "the request spares nothing": (None, {"never": {"tool_names": []}}, True),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("operator", "request_", "asks"), WORDS.values(), ids=WORDS)
async def test_whose_word_it_is(upstream: Upstream, operator: Any, request_: Any, asks: bool) -> None:
    async with desk(upstream, entry={"require_approval": operator}) as here:
        here.say(calls("echo", text="x"), ANSWER)
        response = await here.whole(tools=[DOCS | {"require_approval": request_}])
        assert (len(made(response, "mcp_approval_request")), len(made(response))) == ((1, 0) if asks else (0, 1))
