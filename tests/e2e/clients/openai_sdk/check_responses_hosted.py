"""Server tools of the Responses API on real tool servers: MCP, approvals, web and code."""

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

ANSWER = "Here is the answer."
DOCS: dict[str, Any] = {"type": "mcp", "server_label": "docs"}
GUARDED: dict[str, Any] = {"type": "mcp", "server_label": "guarded"}
WEB: dict[str, Any] = {"type": "web_search"}
CODE: dict[str, Any] = {"type": "code_interpreter", "container": {"type": "auto"}}
MAX_WAIT_S = 8.0
WHOLE_AND_STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])

TOOL_REQUEST = to_play("a tool, then: an answer", tools=[DOCS])
TOOL_ITEM_TYPES = ["mcp_list_tools", "reasoning", "mcp_call", "reasoning", "message"]


def create_response(client: OpenAI, fields: dict[str, Any], stream: bool) -> Any:
    """Create a response, whole or streamed, and return it."""
    if not stream:
        return client.responses.create(**fields)
    return client.responses.retrieve(folded(watched(client, fields))["id"])


def item_types(response: Any) -> list[str]:
    return [item.type for item in response.output]


def unchecked_response(client: OpenAI, fields: dict[str, Any], stream: bool) -> Any:
    """Create a response with items for which the SDK has no type, whole or streamed."""
    if not stream:
        return client.responses.create(**fields)
    *_, last = client.responses.create(**fields, stream=True)
    return last.response


def items_of(response: Any, kind: str = "mcp_call") -> list[Any]:
    return [item for item in response.output if item.type == kind]


def approval_response(request: Any, approve: bool, **fields: Any) -> dict[str, Any]:
    return {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": approve, **fields}


@WHOLE_AND_STREAMED
def test_an_mcp_tool_is_called(scripted: OpenAI, stream: bool) -> None:
    response = create_response(scripted, TOOL_REQUEST, stream)
    assert (item_types(response), response.output_text, response.status) == (TOOL_ITEM_TYPES, ANSWER, "completed")
    [listed], [call] = items_of(response, "mcp_list_tools"), items_of(response)
    assert (listed.id[:5], call.id[:4], call.server_label) == ("mcpl_", "mcp_", "docs")
    assert "echo" in [tool.name for tool in listed.tools]
    assert (call.name, json.loads(call.arguments), call.output) == ("echo", {"text": "hello"}, "hello")
    assert (call.status, call.error, call.approval_request_id) == ("completed", None, None)
    assert [tool.to_dict()["server_label"] for tool in response.tools] == ["docs"]


def test_mcp_events_are_in_order(scripted: OpenAI) -> None:
    events = watched(scripted, TOOL_REQUEST)
    event_names = [
        event["type"].removeprefix("response.") for event in events if event["type"].startswith("response.mcp")
    ]
    deltas = event_names.count("mcp_call_arguments.delta")
    assert deltas >= 1
    assert event_names == [
        *("mcp_list_tools.in_progress", "mcp_list_tools.completed", "mcp_call.in_progress"),
        *["mcp_call_arguments.delta"] * deltas,
        *("mcp_call_arguments.done", "mcp_call.completed"),
    ]
    assert [item["type"] for item in folded(events)["output"]] == TOOL_ITEM_TYPES


def test_the_stream_helper_emits_mcp_events(scripted: OpenAI) -> None:
    with scripted.responses.stream(**TOOL_REQUEST) as stream:
        event_types = [event.type for event in stream]
        assert item_types(stream.get_final_response()) == TOOL_ITEM_TYPES
    assert "response.mcp_call.completed" in event_types


async def test_the_async_client_gets_mcp_items(async_scripted: AsyncOpenAI) -> None:
    response = await async_scripted.responses.create(**TOOL_REQUEST)
    assert (item_types(response), response.output_text) == (TOOL_ITEM_TYPES, ANSWER)


def test_an_mcp_server_can_be_given_by_url(scripted: OpenAI, stage: Stage) -> None:
    server = {"type": "mcp", "server_label": "docs", "server_url": stage.tools["docs"], "require_approval": "never"}
    response = scripted.responses.create(**to_play("a tool, then: an answer", tools=[server]))
    assert [call.output for call in items_of(response)] == ["hello"]


def test_an_unknown_mcp_server_is_rejected(scripted: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.responses.create(**to_play("an answer", tools=[{"type": "mcp", "server_label": "nobody"}]))
    assert (raised.value.param or "").startswith("tools")


def test_allowed_tools_are_called_in_sequence(scripted: OpenAI) -> None:
    response = scripted.responses.create(
        **to_play("a tool, then: a tool, then: an answer", tools=[{**DOCS, "allowed_tools": ["echo"]}])
    )
    assert [tool.name for tool in items_of(response, "mcp_list_tools")[0].tools] == ["echo"]
    assert [call.output for call in items_of(response)] == ["hello", "hello"]


def test_a_tool_error_is_reported(stage: Stage, connect: Callable[..., OpenAI]) -> None:
    # Not every version of the SDK has a type for the error.
    client = connect(f"{stage.scripted}/v1", api_key=stage.key, _strict_response_validation=False)
    raw = client.responses.with_raw_response.create(**to_play("a tool that fails, then: an answer", tools=[DOCS]))
    response = raw.parse()
    [call] = items_of(response)
    assert (call.status, call.output, response.output_text) == ("failed", None, ANSWER)
    [error] = [item["error"] for item in raw.http_response.json()["output"] if item["type"] == "mcp_call"]
    assert error["type"] == "mcp_tool_execution_error"


@pytest.mark.parametrize("stored", [True, False], ids=["previous_response_id", "all items sent back"])
def test_a_chat_continues_after_an_mcp_call(scripted: OpenAI, stored: bool) -> None:
    first = scripted.responses.create(**{**TOOL_REQUEST, "store": stored})
    new_input: list[Any] = [{"role": "user", "content": "script: an answer"}]
    if stored:
        request = to_ask(new_input, model="scripted", tools=[DOCS], previous_response_id=first.id)
    else:
        first_input: list[Any] = [{"role": "user", "content": TOOL_REQUEST["input"]}]
        request = to_ask([*first_input, *first.output, *new_input], model="scripted", tools=[DOCS], store=False)
    second = scripted.responses.create(**request)
    # The tool list is already in the history, so it is not repeated.
    assert (item_types(second), second.output_text) == (["reasoning", "message"], ANSWER)
    if stored:
        listed = [item.type for item in scripted.responses.input_items.list(second.id, order="asc")]
        assert listed == ["message"]


@WHOLE_AND_STREAMED
@pytest.mark.parametrize("stored", [True, False], ids=["previous_response_id", "all items sent back"])
def test_a_question_of_a_tool_is_answered(
    stage: Stage, connect: Callable[..., OpenAI], stored: bool, stream: bool
) -> None:
    # The SDK has no type for the question.
    client = connect(f"{stage.scripted}/v1", api_key=stage.key, _strict_response_validation=False)
    fields = {"tools": [DOCS], "store": stored}
    first_request = to_play("a question, then: an answer", **fields)
    first = unchecked_response(client, first_request, stream)
    [question] = items_of(first, "mcp_elicitation_request")
    assert (question.message, question.mode) == ("When do you travel to Oslo?", "form")
    content = {"day": "Monday", "seats": 2}
    answer = {
        "type": "mcp_elicitation_response",
        "elicitation_request_id": question.id,
        "action": "accept",
        "content": content,
    }
    if stored:
        request = to_ask([answer], model="scripted", previous_response_id=first.id, **fields)
    else:
        history: list[Any] = [{"role": "user", "content": first_request["input"]}, *first.output, answer]
        request = to_ask(history, model="scripted", **fields)
    second = unchecked_response(client, request, stream)
    assert [call.output for call in items_of(second)] == ["booked Oslo on Monday for 2"]
    assert second.output_text == ANSWER


@WHOLE_AND_STREAMED
@pytest.mark.parametrize("approve", [True, False], ids=["approved", "rejected"])
def test_a_guarded_call_runs_only_if_approved(scripted: OpenAI, approve: bool, stream: bool) -> None:
    first_request = to_play("a guarded tool, then: an answer", tools=[GUARDED])
    first = create_response(scripted, first_request, stream)
    assert (item_types(first), first.status) == (["mcp_list_tools", "reasoning", "mcp_approval_request"], "completed")
    [approval_request] = items_of(first, "mcp_approval_request")
    assert (approval_request.id[:5], approval_request.name, approval_request.server_label) == (
        "mcpr_",
        "echo",
        "guarded",
    )
    fields = {
        **first_request,
        "previous_response_id": first.id,
        "input": [approval_response(approval_request, approve)],
    }
    second = create_response(scripted, fields, stream)
    calls = [(call.output, call.approval_request_id) for call in items_of(second)]
    assert calls == ([("hello", approval_request.id)] if approve else [])
    assert second.output_text == ANSWER


def test_a_request_can_require_approval_without_storage(scripted: OpenAI) -> None:
    tools = [{**DOCS, "require_approval": "always"}]
    request: dict[str, Any] = to_ask(
        [{"role": "user", "content": "script: a tool, then: an answer"}], model="scripted", tools=tools, store=False
    )
    first = scripted.responses.create(**request)
    request["input"] += [*first.output, approval_response(items_of(first, "mcp_approval_request")[0], True)]
    second = scripted.responses.create(**request)
    assert ([call.output for call in items_of(second)], second.output_text) == (["hello"], ANSWER)


def test_a_conversation_stores_mcp_items(scripted: OpenAI) -> None:
    conversation = scripted.conversations.create()
    scripted.responses.create(**TOOL_REQUEST, conversation=conversation.id)
    listed = [item.type for item in scripted.conversations.items.list(conversation.id, order="asc")]
    assert listed == ["message", *TOOL_ITEM_TYPES]


def test_a_background_response_calls_mcp_tools(scripted: OpenAI) -> None:
    request = to_play("a tool, slowly, then: an answer", tools=[DOCS], background=True)
    first = scripted.responses.create(**request)
    assert first.status == "queued"
    deadline = time.monotonic() + MAX_WAIT_S
    response: Any = first
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
        response = scripted.responses.retrieve(first.id)
    assert (item_types(response), response.output_text) == (TOOL_ITEM_TYPES, ANSWER)
    assert folded(watched_again(scripted, first.id))["status"] == "completed"


def test_a_background_stream_resumes_during_an_mcp_call(scripted: OpenAI) -> None:
    events = watched(scripted, {**TOOL_REQUEST, "background": True})
    assert [item["type"] for item in folded(events)["output"]] == TOOL_ITEM_TYPES
    position = next(index for index, event in enumerate(events) if event["type"] == "response.mcp_call.in_progress")
    assert watched_again(scripted, events[0]["response"]["id"], starting_after=position) == events[position + 1 :]


@WHOLE_AND_STREAMED
def test_web_search_results_are_cited(scripted: OpenAI, stream: bool) -> None:
    script = "a search, then: a page, then: a citation"
    response = create_response(
        scripted, to_play(script, tools=[WEB], include=["web_search_call.action.sources"]), stream
    )
    search, page = items_of(response, "web_search_call")
    assert (search.action.type, search.action.query) == ("search", "capital France")
    assert (page.action.type, page.action.url) == ("open_page", "file:///capital.md")
    assert {item.id[:3] for item in (search, page)} == {"ws_"}
    [message] = items_of(response, "message")
    [annotation] = message.content[0].annotations
    assert (annotation.type, annotation.url, annotation.title) == ("url_citation", "file:///capital.md", "Capitals")
    assert message.content[0].text[annotation.start_index : annotation.end_index] == "【1†L4】"


@WHOLE_AND_STREAMED
def test_code_interpreter_returns_outputs(scripted: OpenAI, stream: bool) -> None:
    request = to_play("a program, then: an answer", tools=[CODE], include=["code_interpreter_call.outputs"])
    response = create_response(scripted, request, stream)
    [run] = items_of(response, "code_interpreter_call")
    assert (run.id[:3], run.code, run.status) == ("ci_", "print(6 * 7)", "completed")
    assert [output.to_dict() for output in run.outputs] == [{"type": "logs", "logs": "42\n"}]
    assert run.container_id.startswith("cntr_")
    assert response.output_text == ANSWER


def test_unavailable_builtin_tools_are_omitted_or_rejected(demo: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        demo.responses.create(**to_ask("Hello!", tools=[WEB]))
    response = demo.responses.create(**to_ask("Hello!", tools=[WEATHER, WEB]))
    assert [note.partition(":")[0] for note in about(response)["notes"]] == ["tools.1.type"]
    assert [tool.type for tool in response.tools] == ["function", "web_search"]
