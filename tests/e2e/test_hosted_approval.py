"""Approval of tool calls: requested in one response, decided with the next one.

The next response may continue in any way, on any gateway.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.contract.servers import Server
from tests.e2e.hosting import DOCS, calls, desk, made, result
from tests.e2e.responses import ANSWER, OK, THOUGHT, Json, Line, kinds, refusal, text_of
from tests.e2e.wires import WIRES
from tests.mcp.conftest import Upstream

DENIED = "The user did not approve this call."


def asking(upstream: Upstream, sections: Json) -> AbstractAsyncContextManager[Line]:
    """Run a gateway that requires approval of every call."""
    return desk(upstream, entry={"require_approval": "always"}, **sections)


@pytest.fixture
async def harness(upstream: Upstream) -> AsyncIterator[Line]:
    async with asking(upstream, {}) as found:
        yield found


@pytest.fixture
async def free(upstream: Upstream) -> AsyncIterator[Line]:
    """The same with a backend without constrained decoding, which follows its script."""
    async with desk(upstream, WIRES["mlx_server"], entry={"require_approval": "always"}) as found:
        yield found


def decided(request: Json, approve: bool, **more: Any) -> Json:
    return {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": approve, **more}


async def asked_for(harness: Line, text: str, *, stream: bool = False, **fields: Any) -> tuple[Json, Json]:
    """Create a response that ends with an approval request; return both."""
    harness.say(calls("echo", text=text))
    response = await harness.responds(stream=stream, **fields)
    assert response["status"] == "completed"
    [request] = made(response, "mcp_approval_request")
    return response, request


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_approved_call_is_made_and_rendered_where_it_was_requested(
    harness: Line, upstream: Upstream, stream: bool
) -> None:
    text = f"approved {stream}"
    first, request = await asked_for(harness, text, stream=stream)
    assert kinds(first["output"]) == ["mcp_list_tools", "reasoning", "mcp_approval_request"]
    assert (request["name"], request["server_label"]) == ("echo", "docs")
    assert upstream.noted(text) == []
    prompt = harness.tokens[-1]
    harness.say(ANSWER)
    second = await harness.responds(stream=stream, previous_response_id=first["id"], input=[decided(request, True)])
    assert kinds(second["output"]) == ["mcp_call", "reasoning", "message"]
    [call] = made(second)
    assert (call["output"], call["approval_request_id"]) == (text, request["id"])
    assert upstream.noted(text) == [f"echo {text}"]
    # The turn continues, so its reasoning stays and the new prompt extends the old one.
    assert harness.tokens[-1][: len(prompt)] == prompt
    assert harness.said.endswith(calls("echo", text=text) + result("echo", text))
    harness.say(OK)
    await harness.whole(previous_response_id=second["id"], input="Thanks")
    assert calls("echo", "", text=text) + result("echo", text) in harness.said


FORCED: dict[str, Any] = {
    "any tool": "required",
    "any tool of the server": {"type": "mcp", "server_label": "docs"},
    "this tool": {"type": "mcp", "server_label": "docs", "name": "echo"},
}


@pytest.mark.slow
@pytest.mark.parametrize("choice", FORCED.values(), ids=FORCED)
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
async def test_approved_call_satisfies_the_tool_choice(free: Line, choice: Any, background: bool) -> None:
    first, request = await asked_for(free, "has to be", tool_choice=choice)
    free.say(ANSWER)
    fields = {"previous_response_id": first["id"], "input": [decided(request, True)], "tool_choice": choice}
    second = (await free.streamed(background=True, **fields)).last if background else await free.whole(**fields)
    assert kinds(second["output"]) == ["mcp_call", "reasoning", "message"]
    assert "unmet" not in second["unisono"]


@pytest.mark.parametrize("approve", [True, False], ids=["other call approved", "call denied"])
async def test_tool_choice_still_applies_if_its_call_was_not_made(free: Line, approve: bool) -> None:
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


async def test_denied_call_is_not_made_and_its_reason_reaches_the_model(harness: Line, upstream: Upstream) -> None:
    first, request = await asked_for(harness, "denied")
    harness.say(OK)
    answer = decided(request, False, reason="Too dear.")
    second = await harness.whole(previous_response_id=first["id"], input=[answer])
    assert made(second) == []
    assert harness.said.endswith(result("echo", f"{DENIED} Too dear."))
    assert upstream.noted("denied") == []
    harness.say(OK)
    await harness.whole(previous_response_id=second["id"], input="And?")
    assert calls("echo", "", text="denied") + result("echo", f"{DENIED} Too dear.") in harness.said


async def test_guardrails_check_the_reason_of_a_denial(upstream: Upstream) -> None:
    patterns = [
        {"pattern_type": "prebuilt", "pattern_name": "email", "action": "MASK"},
        {"pattern_type": "regex", "name": "ticket", "pattern": "TICKET-[0-9]", "action": "BLOCK"},
    ]
    params = {"guardrail": "litellm_content_filter", "mode": "pre_call", "default_on": True, "patterns": patterns}
    async with asking(upstream, {"guardrails": [{"guardrail_name": "filter", "litellm_params": params}]}) as harness:
        first, request = await asked_for(harness, "guarded")
        harness.say(OK)
        answer = decided(request, False, reason="Because of TICKET-1.")
        refused = await harness.post(previous_response_id=first["id"], input=[answer])
        assert (refused.status, refused.body["error"]["code"]) == (400, "content_blocked")
        answer = decided(request, False, reason="Ask ann@example.com.")
        await harness.whole(previous_response_id=first["id"], input=[answer])
        assert harness.said.endswith(result("echo", f"{DENIED} Ask [EMAIL_REDACTED]."))
        assert upstream.noted("guarded") == []


async def test_unanswered_approval_request_is_a_denial(harness: Line, upstream: Upstream) -> None:
    first, _ = await asked_for(harness, "unanswered")
    harness.say(OK)
    second = await harness.whole(previous_response_id=first["id"], input="Never mind.")
    assert result("echo", DENIED) + "<|start|>user<|message|>Never mind." in harness.said
    assert upstream.noted("unanswered") == []
    harness.say(OK)
    await harness.whole(previous_response_id=second["id"], input="Really.")
    assert result("echo", DENIED) + "<|start|>user<|message|>Never mind." in harness.said


async def test_result_follows_its_call_before_further_messages(harness: Line) -> None:
    first, request = await asked_for(harness, "more")
    harness.say(OK)
    more = [decided(request, True), {"role": "user", "content": "And hurry."}]
    second = await harness.whole(previous_response_id=first["id"], input=more)
    expected = result("echo", "more") + "<|start|>user<|message|>And hurry."
    assert expected in harness.said
    harness.say(OK)
    await harness.whole(previous_response_id=second["id"], input="Thanks")
    assert expected in harness.said


async def test_approved_call_is_made_in_a_conversation(harness: Line, upstream: Upstream) -> None:
    conversation = await harness.conversation()
    _, request = await asked_for(harness, "conversing", conversation=conversation)
    harness.say(ANSWER)
    second = await harness.whole(conversation=conversation, input=[decided(request, True)])
    assert [call["output"] for call in made(second)] == ["conversing"]
    item_types = kinds(await harness.items(conversation))
    assert item_types == [
        "message", "mcp_list_tools", "reasoning", "mcp_approval_request",
        "mcp_approval_response", "mcp_call", "reasoning", "message",
    ]  # fmt: skip


async def test_approval_works_with_a_history_sent_by_the_client(harness: Line, upstream: Upstream) -> None:
    first, request = await asked_for(harness, "carried", store=False)
    harness.say(ANSWER)
    history = [{"role": "user", "content": "Hi"}, *first["output"], decided(request, True)]
    second = await harness.whole(input=history, store=False)
    [call] = made(second)
    assert (call["output"], call["approval_request_id"]) == ("carried", request["id"])
    assert kinds(second["output"])[0] == "mcp_call"
    harness.say(OK)
    await harness.whole(input=[*history, *second["output"], {"role": "user", "content": "Thanks"}], store=False)
    assert harness.said.count(result("echo", "carried")) == 1
    assert upstream.noted("carried") == ["echo carried"]


async def test_approved_call_is_made_in_the_background(harness: Line, upstream: Upstream) -> None:
    first, request = await asked_for(harness, "behind")
    harness.say(ANSWER)
    second = await harness.streamed(previous_response_id=first["id"], input=[decided(request, True)], background=True)
    assert [call["output"] for call in made(second.last)] == ["behind"]


async def test_approval_works_on_another_gateway_with_the_same_redis(upstream: Upstream, redis_server: Server) -> None:
    shared = {"store": {"url": redis_server.url, "deadline_s": 5}}
    async with asking(upstream, shared) as first_gateway, asking(upstream, shared) as second_gateway:
        first, request = await asked_for(first_gateway, "elsewhere")
        second_gateway.say(ANSWER)
        second = await second_gateway.whole(previous_response_id=first["id"], input=[decided(request, True)])
        assert [call["output"] for call in made(second)] == ["elsewhere"]
        assert second_gateway.tokens[-1][: len(first_gateway.tokens[-1])] == first_gateway.tokens[-1]


async def test_several_calls_are_decided_separately(harness: Line, upstream: Upstream) -> None:
    first_call, second_call = (calls("echo", "", text=f"several {number}") for number in (1, 2))
    harness.say(THOUGHT + first_call + "<|start|>assistant" + second_call)
    first = await harness.whole()
    requests = made(first, "mcp_approval_request")
    assert len(requests) == 2
    harness.say(ANSWER)
    answers = [decided(requests[0], False), decided(requests[1], True)]
    second = await harness.whole(previous_response_id=first["id"], input=answers)
    assert [call["output"] for call in made(second)] == ["several 2"]
    assert upstream.noted("several") == ["echo several 2"]
    assert result("echo", DENIED) in harness.said


async def test_approved_call_of_a_tool_that_is_no_longer_allowed_fails(harness: Line, upstream: Upstream) -> None:
    first, request = await asked_for(harness, "withdrawn")
    harness.say(ANSWER)
    tools = [DOCS | {"allowed_tools": ["facts"]}]
    second = await harness.whole(previous_response_id=first["id"], input=[decided(request, True)], tools=tools)
    assert [call["status"] for call in made(second)] == ["failed"]
    assert upstream.noted("withdrawn") == []
    assert text_of(second) == "ok"


async def test_approval_of_an_unknown_or_decided_request_is_refused(harness: Line) -> None:
    first, request = await asked_for(harness, "nothing")
    at = "input.0.approval_request_id"
    nowhere = decided(request | {"id": "mcpr_nowhere"}, True)
    continued = {"previous_response_id": first["id"]}
    refusal(await harness.post(input=[nowhere], **continued), 404, at)
    # A request of a response that is not continued is unknown, even to its owner.
    refusal(await harness.post(input=[decided(request, True)]), 404, at)
    twice = [decided(request, True), decided(request, False)]
    refusal(await harness.post(input=twice, **continued), 400, "input.1.approval_request_id")
    harness.say(OK)
    second = await harness.whole(input=[decided(request, False)], **continued)
    again = await harness.post(input=[decided(request, True)], previous_response_id=second["id"])
    refusal(again, 400, at)


SETTINGS: dict[str, tuple[Any, Any, bool]] = {
    # setting of the operator, setting of the request, whether approval is requested
    "no setting": (None, None, True),
    "operator never": ("never", None, False),
    "operator always": ("always", "never", True),
    "request never": (None, "never", False),
    "request always": ("never", "always", True),
    "request includes the tool": ("never", {"always": {"tool_names": ["echo"]}}, True),
    "request exempts another tool": (None, {"never": {"tool_names": ["facts"]}}, True),
    "request exempts the tool": (None, {"never": {"tool_names": ["echo"]}}, False),
    "operator exempts read-only tools": ({"never": {"read_only": True}}, None, False),
    "operator includes read-only tools": ({"always": {"read_only": True}, "otherwise": "never"}, "never", True),
    "request exempts no tool": (None, {"never": {"tool_names": []}}, True),
}


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(("operator", "request_", "asks"), SETTINGS.values(), ids=SETTINGS)
async def test_approval_is_requested_by_operator_and_request_settings(
    upstream: Upstream, operator: Any, request_: Any, asks: bool
) -> None:
    async with desk(upstream, entry={"require_approval": operator}) as harness:
        harness.say(calls("echo", text="x"), ANSWER)
        response = await harness.whole(tools=[DOCS | {"require_approval": request_}])
        assert (len(made(response, "mcp_approval_request")), len(made(response))) == ((1, 0) if asks else (0, 1))
