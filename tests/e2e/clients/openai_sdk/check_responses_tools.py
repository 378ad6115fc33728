"""Tool loop over the Responses API, with `previous_response_id` or all items sent back."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import ResponseOutputItem
from openai_sdk.responding import ECHO, RESULT, WEATHER, about, call_in, folded, result_of, to_ask, to_play, watched
from pydantic import TypeAdapter

PARIS = "What is the weather in Paris?"
ANSWER = "It is sunny in Paris with 18 degrees."


def create_response(client: OpenAI, fields: dict[str, Any], stream: bool) -> Any:
    """Create a response, whole or streamed, and return it."""
    if not stream:
        return client.responses.create(**fields)
    return client.responses.retrieve(folded(watched(client, fields))["id"])


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "stream"])
def test_the_tool_loop_continues_by_previous_response_id(demo: OpenAI, stream: bool) -> None:
    first = create_response(demo, to_ask(PARIS, tools=[WEATHER]), stream)
    call = call_in(first)
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert (call.id[:3], call.call_id[:5]) == ("fc_", "call_")
    assert json.loads(call.arguments) == {"location": "Paris"}
    assert first.output_text == ""

    second = create_response(demo, to_ask([result_of(call)], previous_response_id=first.id, tools=[WEATHER]), stream)
    assert (second.output_text, second.previous_response_id) == (ANSWER, first.id)
    # The engine continues from the tokens that it generated, including calls.
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 8


# Case: (store, include).
HISTORY_MODES: dict[str, tuple[bool, list[Any]]] = {
    "stored, plain reasoning": (True, []),
    "not stored, plain reasoning": (False, []),
    "not stored, encrypted reasoning": (False, ["reasoning.encrypted_content"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("stored, plain reasoning", marks=pytest.mark.slow),
        pytest.param("not stored, plain reasoning", marks=pytest.mark.slow),
        "not stored, encrypted reasoning",
    ],
)
def test_the_tool_loop_continues_with_all_items_sent_back(demo: OpenAI, mode: str) -> None:
    store, include = HISTORY_MODES[mode]
    request: dict[str, Any] = to_ask(
        [{"role": "user", "content": PARIS}], tools=[WEATHER], store=store, include=include
    )
    first = demo.responses.create(**request)
    request["input"] += [*first.output, result_of(call_in(first))]
    second = demo.responses.create(**request)
    assert second.output_text == ANSWER
    request["input"] += [*second.output, {"role": "user", "content": "ping"}]
    third = demo.responses.create(**{**request, "max_output_tokens": 8})
    assert third.output[0].type == "reasoning"


@pytest.mark.slow
def test_the_tool_loop_continues_with_plain_dictionaries(demo: OpenAI) -> None:
    request: dict[str, Any] = to_ask([{"role": "user", "content": PARIS}], tools=[WEATHER], store=False)
    output = demo.responses.create(**request).to_dict()["output"]
    assert isinstance(output, list)
    call: Any = next(item for item in output if item["type"] == "function_call")
    bare_call = {name: call[name] for name in ("type", "call_id", "name", "arguments")}
    request["input"] += [bare_call, {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}]
    assert demo.responses.create(**request).output_text == ANSWER


@pytest.mark.slow
def test_sequential_calls_are_answered(demo: OpenAI) -> None:
    response = demo.responses.create(**to_ask("Compare the weather in London and Tokyo.", tools=[WEATHER]))
    locations = []
    for weather in (RESULT, "11 degrees, rainy"):
        call = call_in(response)
        locations.append(json.loads(call.arguments)["location"])
        response = demo.responses.create(
            **to_ask([result_of(call, weather)], previous_response_id=response.id, tools=[WEATHER])
        )
    assert (locations, response.output_text) == (["London", "Tokyo"], "I compared London and Tokyo.")


@pytest.mark.slow
def test_a_preamble_is_a_message_of_its_own(demo: OpenAI) -> None:
    request = to_ask("Make a plan first, then check the weather in Oslo.", tools=[WEATHER])
    first = demo.responses.create(**request)
    _, preamble, call = first.output
    assert preamble.type == "message"
    assert (preamble.phase, first.output_text) == ("commentary", "I will check the weather in Oslo first.")
    second = demo.responses.create(
        **to_ask([result_of(call, "3 degrees, cloudy")], previous_response_id=first.id, tools=[WEATHER])
    )
    assert second.output_text == "It is cloudy in Oslo with 3 degrees."
    assert second.output[-1].type == "message"
    assert second.output[-1].phase == "final_answer"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_parallel_calls_are_answered_together(scripted: OpenAI, stream: bool) -> None:
    first = create_response(scripted, to_play("two calls", tools=[WEATHER]), stream)
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments)["location"] for call in calls] == ["Paris", "Rome"]
    assert len({call.call_id for call in calls}) == 2
    results = [result_of(call) for call in reversed(calls)]
    input_items = [*results, {"role": "user", "content": "script: an answer"}]
    second = create_response(
        scripted, to_ask(input_items, model="scripted", previous_response_id=first.id, tools=[WEATHER]), stream
    )
    assert second.output_text == "Here is the answer."


def test_an_output_for_an_unknown_call_is_rejected(scripted: OpenAI) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_none", "output": "x"}
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.responses.create(**to_ask([call, output], model="scripted"))
    assert raised.value.param == "input.1.call_id"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_custom_tool_takes_plain_text(scripted: OpenAI, stream: bool) -> None:
    first = create_response(scripted, to_play("a custom call", tools=[ECHO]), stream)
    call = call_in(first)
    assert (call.type, call.id[:4], call.name, call.input) == ("custom_tool_call", "ctc_", "echo", 'said "so"')
    input_items = [result_of(call), {"role": "user", "content": "script: an answer"}]
    fields = {"model": "scripted", "tools": [ECHO]}
    second = create_response(scripted, to_ask(input_items, previous_response_id=first.id, **fields), stream)
    assert second.output_text == "Here is the answer."
    full_history = [{"role": "user", "content": "script: a custom call"}, *first.output, *input_items]
    assert scripted.responses.create(**to_ask(full_history, **fields)).output_text == "Here is the answer."
    listed = scripted.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in listed] == ["custom_tool_call_output", "message"]


# Script, tool, and the result of its call without the link to the call.
CLIENT_TOOLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a shell": (
        {"type": "shell", "environment": {"type": "local"}},
        {"output": [{"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
    ),
    "a local shell": ({"type": "local_shell"}, {"output": "a.py"}),
    "a patch": ({"type": "apply_patch"}, {"status": "completed"}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("name", "tool", "result"), [(name, *case) for name, case in CLIENT_TOOLS.items()])
def test_a_built_in_tool_of_the_client_has_its_own_items(
    scripted: OpenAI, name: str, tool: dict[str, Any], result: dict[str, Any], stream: bool
) -> None:
    first = create_response(scripted, to_play(name, tools=[tool]), stream)
    call = first.output[-1]
    assert (call.type, call.status) == (f"{tool['type']}_call", "completed")
    TypeAdapter(ResponseOutputItem).validate_python(call.to_dict())
    output = {"type": f"{call.type}_output", **result}
    output |= {"id": call.call_id} if call.type == "local_shell_call" else {"call_id": call.call_id}
    input_items = [output, {"role": "user", "content": "script: an answer"}]
    fields = {"model": "scripted", "tools": [tool]}
    second = create_response(scripted, to_ask(input_items, previous_response_id=first.id, **fields), stream)
    assert second.output_text == "Here is the answer."
    assert "notes" not in about(second)
    full_history = [{"role": "user", "content": f"script: {name}"}, *first.output, *input_items]
    assert scripted.responses.create(**to_ask(full_history, **fields)).output_text == "Here is the answer."
    listed = list(scripted.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in listed] == [output["type"], "message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_gateway_searches_deferred_tools(scripted: OpenAI, stream: bool) -> None:
    tools = [{"type": "tool_search"}, ECHO, {**WEATHER, "defer_loading": True}]
    first = create_response(scripted, to_play("a tool search, then: a preamble", tools=tools), stream)
    search, found = (item for item in first.output if item.type.startswith("tool_search"))
    assert (search.type, search.execution, search.arguments) == ("tool_search_call", "server", {"query": "weather"})
    assert (found.type, [tool.name for tool in found.tools]) == ("tool_search_output", ["get_weather"])
    for item in (search, found):
        TypeAdapter(ResponseOutputItem).validate_python(item.to_dict())
    assert first.output[-1].name == "get_weather"


@pytest.mark.slow
def test_tool_choice_none_suppresses_calls(demo: OpenAI) -> None:
    response = demo.responses.create(**to_ask(PARIS, tools=[WEATHER], tool_choice="none", max_output_tokens=60))
    assert response.tool_choice == "none"
    assert "function_call" not in [item.type for item in response.output]


def test_unsupported_tool_types_are_ignored(scripted: OpenAI) -> None:
    response = scripted.responses.create(**to_play("an answer", tools=[WEATHER, {"type": "image_generation"}]))
    assert response.output_text == "Here is the answer."
    assert [tool.type for tool in response.tools] == ["function", "image_generation"]


async def test_the_async_client_completes_the_tool_loop(async_scripted: AsyncOpenAI) -> None:
    first = await async_scripted.responses.create(**to_play("a preamble", tools=[WEATHER]))
    input_items = [result_of(call_in(first)), {"role": "user", "content": "script: an answer"}]
    fields = to_ask(input_items, model="scripted", previous_response_id=first.id, tools=[WEATHER])
    async with async_scripted.responses.stream(**fields) as stream:
        assert (await stream.get_final_response()).output_text == "Here is the answer."
