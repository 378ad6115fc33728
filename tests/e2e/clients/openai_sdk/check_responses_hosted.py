"""Tools the gateway runs itself, on real tool servers: MCP servers of the operator, approvals, the web and code."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai_sdk.responding import WEATHER, about, folded, to_ask, to_play, watched, watched_again

from conftest import Stage

SAID = "Here is the answer."
DOCS: dict[str, Any] = {"type": "mcp", "server_label": "docs"}
GUARDED: dict[str, Any] = {"type": "mcp", "server_label": "guarded"}
WEB: dict[str, Any] = {"type": "web_search"}
CODE: dict[str, Any] = {"type": "code_interpreter", "container": {"type": "auto"}}
SOON_S = 8.0
BOTH_FORMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])

HOSTED = to_play("a tool, then: an answer", tools=[DOCS])
KINDS = ["mcp_list_tools", "reasoning", "mcp_call", "reasoning", "message"]


def answered(client: OpenAI, fields: dict[str, Any], stream: bool) -> Any:
    """The answer, which may have come as a stream."""
    if not stream:
        return client.responses.create(**fields)
    return client.responses.retrieve(folded(watched(client, fields))["id"])


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


def made(response: Any, kind: str = "mcp_call") -> list[Any]:
    return [item for item in response.output if item.type == kind]


def decided(request: Any, approve: bool, **more: Any) -> dict[str, Any]:
    return {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": approve, **more}


@BOTH_FORMS
def test_a_tool_of_an_mcp_server_is_run(scripted: OpenAI, stream: bool) -> None:
    response = answered(scripted, HOSTED, stream)
    assert (kinds(response), response.output_text, response.status) == (KINDS, SAID, "completed")
    [listed], [call] = made(response, "mcp_list_tools"), made(response)
    assert (listed.id[:5], call.id[:4], call.server_label) == ("mcpl_", "mcp_", "docs")
    assert "echo" in [tool.name for tool in listed.tools]
    assert (call.name, json.loads(call.arguments), call.output) == ("echo", {"text": "hello"}, "hello")
    assert (call.status, call.error, call.approval_request_id) == ("completed", None, None)
    assert [tool.to_dict()["server_label"] for tool in response.tools] == ["docs"]


def test_the_events_of_a_tool_come_in_order(scripted: OpenAI) -> None:
    events = watched(scripted, HOSTED)
    hosted = [event["type"].removeprefix("response.") for event in events if event["type"].startswith("response.mcp")]
    deltas = hosted.count("mcp_call_arguments.delta")
    assert deltas >= 1
    assert hosted == [
        *("mcp_list_tools.in_progress", "mcp_list_tools.completed", "mcp_call.in_progress"),
        *["mcp_call_arguments.delta"] * deltas,
        *("mcp_call_arguments.done", "mcp_call.completed"),
    ]
    assert [item["type"] for item in folded(events)["output"]] == KINDS


def test_the_sdks_own_stream_helper_follows(scripted: OpenAI) -> None:
    with scripted.responses.stream(**HOSTED) as stream:
        seen = [event.type for event in stream]
        assert kinds(stream.get_final_response()) == KINDS
    assert "response.mcp_call.completed" in seen


async def test_an_async_client(async_scripted: AsyncOpenAI) -> None:
    response = await async_scripted.responses.create(**HOSTED)
    assert (kinds(response), response.output_text) == (KINDS, SAID)


def test_a_server_by_its_address(scripted: OpenAI, stage: Stage) -> None:
    server = {"type": "mcp", "server_label": "docs", "server_url": stage.tools["docs"], "require_approval": "never"}
    response = scripted.responses.create(**to_play("a tool, then: an answer", tools=[server]))
    assert [call.output for call in made(response)] == ["hello"]


def test_a_server_nobody_configured_is_refused(scripted: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.responses.create(**to_play("an answer", tools=[{"type": "mcp", "server_label": "nobody"}]))
    assert (raised.value.param or "").startswith("tools")


def test_several_tools_in_turn_and_a_choice_of_them(scripted: OpenAI) -> None:
    response = scripted.responses.create(
        **to_play("a tool, then: a tool, then: an answer", tools=[{**DOCS, "allowed_tools": ["echo"]}])
    )
    assert [tool.name for tool in made(response, "mcp_list_tools")[0].tools] == ["echo"]
    assert [call.output for call in made(response)] == ["hello", "hello"]


def test_what_a_tool_fails_with_is_told(stage: Stage, connect: Callable[..., OpenAI]) -> None:
    # Not every version of the SDK knows what an error looks like.
    client = connect(f"{stage.scripted}/v1", api_key=stage.key, _strict_response_validation=False)
    raw = client.responses.with_raw_response.create(**to_play("a tool that fails, then: an answer", tools=[DOCS]))
    response = raw.parse()
    [call] = made(response)
    assert (call.status, call.output, response.output_text) == ("failed", None, SAID)
    [error] = [item["error"] for item in raw.http_response.json()["output"] if item["type"] == "mcp_call"]
    assert error["type"] == "mcp_tool_execution_error"


@pytest.mark.parametrize("kept", [True, False], ids=["by name", "all sent back"])
def test_a_conversation_goes_on_behind_a_tool(scripted: OpenAI, kept: bool) -> None:
    first = scripted.responses.create(**{**HOSTED, "store": kept})
    more: list[Any] = [{"role": "user", "content": "script: an answer"}]
    if kept:
        asking = to_ask(more, model="scripted", tools=[DOCS], previous_response_id=first.id)
    else:
        asked: list[Any] = [{"role": "user", "content": HOSTED["input"]}]
        asking = to_ask([*asked, *first.output, *more], model="scripted", tools=[DOCS], store=False)
    second = scripted.responses.create(**asking)
    # The list is in the past and stays there.
    assert (kinds(second), second.output_text) == (["reasoning", "message"], SAID)
    if kept:
        listed = [item.type for item in scripted.responses.input_items.list(second.id, order="asc")]
        assert listed == ["message"]


@BOTH_FORMS
@pytest.mark.parametrize("approve", [True, False], ids=["yes", "no"])
def test_a_call_that_has_to_be_approved(scripted: OpenAI, approve: bool, stream: bool) -> None:
    asking = to_play("a guarded tool, then: an answer", tools=[GUARDED])
    first = answered(scripted, asking, stream)
    assert (kinds(first), first.status) == (["mcp_list_tools", "reasoning", "mcp_approval_request"], "completed")
    [request] = made(first, "mcp_approval_request")
    assert (request.id[:5], request.name, request.server_label) == ("mcpr_", "echo", "guarded")
    fields = {**asking, "previous_response_id": first.id, "input": [decided(request, approve)]}
    second = answered(scripted, fields, stream)
    calls = [(call.output, call.approval_request_id) for call in made(second)]
    assert calls == ([("hello", request.id)] if approve else [])
    assert second.output_text == SAID


def test_a_request_may_ask_for_more_approval_and_carry_it_all_itself(scripted: OpenAI) -> None:
    careful = [{**DOCS, "require_approval": "always"}]
    asking: dict[str, Any] = to_ask(
        [{"role": "user", "content": "script: a tool, then: an answer"}], model="scripted", tools=careful, store=False
    )
    first = scripted.responses.create(**asking)
    asking["input"] += [*first.output, decided(made(first, "mcp_approval_request")[0], True)]
    second = scripted.responses.create(**asking)
    assert ([call.output for call in made(second)], second.output_text) == (["hello"], SAID)


def test_a_conversation_of_the_gateway_keeps_what_tools_did(scripted: OpenAI) -> None:
    conversation = scripted.conversations.create()
    scripted.responses.create(**HOSTED, conversation=conversation.id)
    listed = [item.type for item in scripted.conversations.items.list(conversation.id, order="asc")]
    assert listed == ["message", *KINDS]


def test_in_the_background(scripted: OpenAI) -> None:
    asking = to_play("a tool, slowly, then: an answer", tools=[DOCS], background=True)
    first = scripted.responses.create(**asking)
    assert first.status == "queued"
    until = time.monotonic() + SOON_S
    response: Any = first
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < until
        time.sleep(0.05)
        response = scripted.responses.retrieve(first.id)
    assert (kinds(response), response.output_text) == (KINDS, SAID)
    assert folded(watched_again(scripted, first.id))["status"] == "completed"


def test_in_the_background_and_listened_to(scripted: OpenAI) -> None:
    events = watched(scripted, {**HOSTED, "background": True})
    assert [item["type"] for item in folded(events)["output"]] == KINDS
    place = next(i for i, event in enumerate(events) if event["type"] == "response.mcp_call.in_progress")
    assert watched_again(scripted, events[0]["response"]["id"], starting_after=place) == events[place + 1 :]


@BOTH_FORMS
def test_the_web_is_searched_and_cited(scripted: OpenAI, stream: bool) -> None:
    script = "a search, then: a page, then: a citation"
    response = answered(scripted, to_play(script, tools=[WEB], include=["web_search_call.action.sources"]), stream)
    search, opened = made(response, "web_search_call")
    assert (search.action.type, search.action.query) == ("search", "capital France")
    assert (opened.action.type, opened.action.url) == ("open_page", "file:///capital.md")
    assert {item.id[:3] for item in (search, opened)} == {"ws_"}
    [message] = made(response, "message")
    [note] = message.content[0].annotations
    assert (note.type, note.url, note.title) == ("url_citation", "file:///capital.md", "Capitals")
    assert message.content[0].text[note.start_index : note.end_index] == "【1†L4】"


@BOTH_FORMS
def test_code_is_run(scripted: OpenAI, stream: bool) -> None:
    asking = to_play("a program, then: an answer", tools=[CODE], include=["code_interpreter_call.outputs"])
    response = answered(scripted, asking, stream)
    [run] = made(response, "code_interpreter_call")
    assert (run.id[:3], run.code, run.status) == ("ci_", "print(6 * 7)", "completed")
    assert [output.to_dict() for output in run.outputs] == [{"type": "logs", "logs": "42\n"}]
    assert run.container_id.startswith("cntr_")
    assert response.output_text == SAID


def test_builtin_tools_nobody_runs_are_left_out_or_refused(demo: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        demo.responses.create(**to_ask("Hello!", tools=[WEB]))
    response = demo.responses.create(**to_ask("Hello!", tools=[WEATHER, WEB]))
    assert [note.partition(":")[0] for note in about(response)["notes"]] == ["tools.1.type"]
    assert [tool.type for tool in response.tools] == ["function", "web_search"]
