"""Fields of Responses requests: supported, noted as without effect, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.api.responses.frames import ids
from unisono.api.error_responses import failure_of
from unisono.api.request_options import EFFORTS
from unisono.api.responses.inbound import ResponsesGeneration, check, to_generation_request
from unisono.api.responses.input_conversion import KnownState
from unisono.api.responses.input_items import KINDS, to_listed
from unisono.api.responses.outbound.response import to_echo
from unisono.api.responses.schema import ResponsesRequest
from unisono.core.access import Caller
from unisono.core.generation import Sampling
from unisono.errors import InvalidRequest, UnisonoError


def generation_of(known: KnownState | None = None, **fields: Any) -> ResponsesGeneration:
    request = ResponsesRequest.model_validate({"model": "gpt-oss-20b", "input": "Hi"} | fields)
    check(request)
    return to_generation_request(
        request,
        known or KnownState(),
        model="group",
        today="2026-11-20",
        caller=Caller("default"),
        request_id="req_1",
        new_id=ids(),
    )


def refusal_of(**fields: Any) -> UnisonoError:
    with pytest.raises((ValidationError, InvalidRequest)) as caught:
        generation_of(**fields)
    failure = failure_of(caught.value)
    assert failure.message
    return failure


def item_input(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def message_input(content: Any, role: str = "user") -> dict[str, Any]:
    return item_input(type="message", role=role, content=content)


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", **fields}]}


A_CALL = {"type": "function_call", "call_id": "c1", "name": "f"}
REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    # case: (fields, expected param, expected code)
    "no input": ({"input": None}, "input", "invalid_value"),
    "no items": ({"input": []}, "input", "invalid_value"),
    "input a number": ({"input": 5}, "input", "invalid_value"),
    "item a number": ({"input": [5]}, "input.0", "invalid_value"),
    "item of an unknown type": (item_input(type="dream"), "input.0.type", "invalid_value"),
    "item type a number": (item_input(type=5), "input.0.type", "invalid_value"),
    "model null": ({"model": None}, "model", "invalid_value"),
    "role": (message_input("x", "owner"), "input.0.role", "invalid_value"),
    "message without content": (item_input(role="user"), "input.0.content", "invalid_value"),
    "content a number": (message_input(5), "input.0.content", "invalid_value"),
    "part without text": (message_input([{"type": "input_text"}]), "input.0.content.0.text", "invalid_value"),
    "part unknown": (message_input([{"type": "smell"}]), "input.0.content.0.type", "invalid_value"),
    "image": (
        message_input([{"type": "input_image", "image_url": "x"}]),
        "input.0.content.0.type",
        "unsupported_value",
    ),
    "audio": (message_input([{"type": "input_audio"}]), "input.0.content.0.type", "unsupported_value"),
    "file": (message_input([{"type": "input_file"}]), "input.0.content.0.type", "unsupported_value"),
    "surrogate": (message_input("a\ud800"), "input.0.content.0.text", "invalid_value"),
    "call without id": (item_input(type="function_call", name="f"), "input.0.call_id", "invalid_value"),
    "call with a hostile name": (
        item_input(type="function_call", call_id="c", name="f <|end|>"),
        "input.0.name",
        "invalid_value",
    ),
    "call with a hostile namespace": (
        item_input(type="function_call", call_id="c", name="f", namespace="<|end|>"),
        "input.0.namespace",
        "invalid_value",
    ),
    "call with a name too long": (
        item_input(type="function_call", call_id="c", name="f" * 100, namespace="n" * 100),
        "input.0.name",
        "invalid_value",
    ),
    "output of another call": (
        {"input": [A_CALL, {"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input.1.call_id",
        "invalid_value",
    ),
    "output missing": (item_input(type="function_call_output", call_id="c"), "input.0.output", "invalid_value"),
    "output a refusal": (
        item_input(type="function_call_output", call_id="c", output=[{"type": "refusal", "refusal": "no"}]),
        "input.0.output",
        "invalid_value",
    ),
    "custom output of another call": (
        {"input": [A_CALL, {"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]},
        "input.1.call_id",
        "invalid_value",
    ),
    "reference to nothing": (item_input(type="item_reference", id="msg_9"), "input.0.id", "not_found"),
    "reference without an id": (item_input(type="item_reference"), "input.0.id", "invalid_value"),
    "both kinds of state": (
        {"previous_response_id": "resp_1", "conversation": "conv_1"},
        "previous_response_id",
        "invalid_value",
    ),
    "conversation a number": ({"conversation": 5}, "conversation", "invalid_value"),
    "conversation without id": ({"conversation": {}}, "conversation.id", "invalid_value"),
    "background without store": ({"background": True, "store": False}, "store", "invalid_value"),
    "tool type a list": ({"tools": [{"type": []}]}, "tools.0.type", "invalid_value"),
    "tool without name": (tool(), "tools.0.name", "invalid_value"),
    "tool with a hostile name": (tool(name="f\n"), "tools.0.name", "invalid_value"),
    "tool parameters a list": (tool(name="f", parameters=[]), "tools.0.parameters", "invalid_value"),
    "tool schema too large": (
        tool(name="f", parameters={"enum": ["x" * 1000] * 300}),
        "tools.0.parameters",
        "invalid_value",
    ),
    "tool twice": ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools.1.name", "invalid_value"),
    "only unavailable tools": ({"tools": [{"type": "web_search"}]}, "tools.0.type", "unsupported_value"),
    "fault inside a namespace": (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "a b"}]}]},
        "tools.0.tools.0.name",
        "invalid_value",
    ),
    "namespace with a hostile name": (
        {"tools": [{"type": "namespace", "name": "n\n", "tools": [{"type": "function", "name": "f"}]}]},
        "tools.0.tools.0.name",
        "invalid_value",
    ),
    "strict tool with an open schema": (
        tool(name="f", parameters={"type": "object"}, strict=True),
        "tools.0.parameters.additionalProperties",
        "invalid_value",
    ),
    "tool_choice required without tools": ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    "tool_choice named and not declared": (
        {**tool(name="g"), "tool_choice": {"type": "function", "name": "f"}},
        "tool_choice",
        "invalid_value",
    ),
    "tool_choice of an undeclared server": (
        {**tool(name="g"), "tool_choice": {"type": "mcp", "server_label": "docs"}},
        "tool_choice",
        "invalid_value",
    ),
    "tool_choice of a server without its label": (
        {**tool(name="g"), "tool_choice": {"type": "mcp", "name": "f"}},
        "tool_choice",
        "invalid_value",
    ),
    "tool_choice of an undeclared builtin tool": (
        {**tool(name="g"), "tool_choice": {"type": "web_search_preview"}},
        "tool_choice",
        "invalid_value",
    ),
    "tool_choice of an unavailable builtin tool": (
        {"tools": [{"type": "function", "name": "g"}, {"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        "tool_choice",
        "unsupported_value",
    ),
    "allowed_tools without an available tool": (
        {
            "tools": [{"type": "function", "name": "g"}, {"type": "file_search"}],
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "file_search"}]},
        },
        "tool_choice",
        "invalid_value",
    ),
    "allowed_tools without a list": ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "invalid_value"),
    "format of an unknown type": ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "unsupported_value"),
    "json schema a list": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": []}}},
        "text.format.schema",
        "invalid_value",
    ),
    "json schema with an unsupported keyword": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"items": {"$dynamicRef": "#a"}}}}},
        "text.format.schema.items.$dynamicRef",
        "invalid_value",
    ),
    "reasoning budget a boolean": ({"reasoning": {"max_tokens": True}}, "reasoning.max_tokens", "invalid_value"),
    "verbosity": ({"text": {"verbosity": "chatty"}}, "text.verbosity", "invalid_value"),
    "effort": ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
    "summary": ({"reasoning": {"summary": "poem"}}, "reasoning.summary", "invalid_value"),
    "include unknown": ({"include": ["dreams"]}, "include", "invalid_value"),
    "top_logprobs": ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    "prompt template": ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_value"),
    "truncation": ({"truncation": "middle"}, "truncation", "invalid_value"),
    "metadata many": ({"metadata": {str(n): "x" for n in range(17)}}, "metadata", "invalid_value"),
    "metadata key long": ({"metadata": {"k" * 65: "x"}}, f"metadata.{'k' * 64}", "invalid_value"),
    "metadata value long": ({"metadata": {"k": "x" * 513}}, "metadata.k", "invalid_value"),
    "metadata value a number": ({"metadata": {"k": 1}}, "metadata.k", "invalid_value"),
    "max_output_tokens": ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    "max_tool_calls": ({"max_tool_calls": 0}, "max_tool_calls", "invalid_value"),
    "temperature": ({"temperature": 2.1}, "temperature", "invalid_value"),
    "top_p": ({"top_p": 1.1}, "top_p", "invalid_value"),
    "stream a string": ({"stream": "true"}, "stream", "invalid_value"),
    "store a number": ({"store": 1}, "store", "invalid_value"),
    "user long": ({"user": "u" * 513}, "user", "invalid_value"),
}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": ""}
ANSWER = {"type": "message", "role": "assistant", "content": "Hi"}
SEARCH = {"type": "web_search_call", "id": "ws_1"}


@pytest.mark.parametrize("status", [{"a": [1]}, 5, "", "x", "failed"], ids=str)
@pytest.mark.parametrize("item", [CALL, OUTPUT, ANSWER, {**ANSWER, "role": "user"}], ids=lambda item: item["type"])
def test_an_invalid_status_of_an_item_is_an_error(item: dict[str, Any], status: Any) -> None:
    failure = refusal_of(input=[{**item, "status": status}])
    assert (failure.param, failure.code) == ("input.0.status", "invalid_value")


def test_an_invalid_status_of_a_tool_call_is_an_error() -> None:
    failure = refusal_of(input=[{**SEARCH, "status": "x"}])
    assert (failure.param, failure.code) == ("input.0.status", "invalid_value")


def test_each_item_accepts_the_statuses_of_its_type() -> None:
    statuses = ["in_progress", "completed", "incomplete", None]
    items = [{**item, "status": status} for item in (CALL, OUTPUT, ANSWER) for status in statuses]
    items += [{**SEARCH, "status": status} for status in ("searching", "failed")]
    items.append({"type": "reasoning", "summary": [], "content": [], "status": "x"})
    request = ResponsesRequest.model_validate({"model": "m", "input": items})
    listed = [to_listed(item)["status"] for item in request.input if item.type != "reasoning"]
    assert listed == [*["in_progress", "completed", "incomplete", "completed"] * 3, "searching", "failed"]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED.values(), ids=REFUSED)
def test_an_error_names_the_invalid_field(fields: dict[str, Any], param: str | None, code: str) -> None:
    failure = refusal_of(**fields)
    assert (failure.param, failure.code) == (param, code)
    assert failure.status == (404 if code == "not_found" else 400)


VALUES_WITHOUT_NOTES: dict[str, dict[str, Any]] = {
    "nulls": dict.fromkeys(
        (
            *("instructions", "tools", "tool_choice", "parallel_tool_calls", "max_tool_calls", "max_output_tokens"),
            *("reasoning", "text", "include", "store", "previous_response_id", "conversation", "background", "stream"),
            *("stream_options", "truncation", "metadata", "prompt_cache_key", "safety_identifier", "user", "prompt"),
            *("temperature", "top_p", "top_logprobs", "service_tier", "context_management", "moderation"),
        )
    ),
    "defaults of OpenAI's clients": {
        "include": [],
        "tools": [],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": None, "summary": None},
        "truncation": "disabled",
        "top_logprobs": 0,
        "store": False,
        "stream_options": {"include_obfuscation": False},
    },
    "supported fields": {
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "user": "u",
        "safety_identifier": "s",
        "metadata": {"a": "b"},
        "max_tool_calls": 3,
    },
}


@pytest.mark.parametrize("fields", VALUES_WITHOUT_NOTES.values(), ids=VALUES_WITHOUT_NOTES)
def test_neutral_and_supported_values_have_no_notes(fields: dict[str, Any]) -> None:
    assert generation_of(**fields).notes == ()


NOTED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": ({"colour": "red"}, "colour: no effect"),
    "service tier": ({"service_tier": "flex"}, "service_tier: no effect"),
    "moderation": ({"moderation": {"model": "m"}}, "moderation: no effect"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity: no effect"),
    "include": ({"include": ["web_search_call.results"]}, "include: 'web_search_call.results' has no effect"),
    "an unavailable tool": (
        {"tools": [{"type": "web_search"}, {"type": "function", "name": "f"}]},
        "tools.0.type: skipped, tools of type 'web_search' are not available; "
        "the operator can enable them with `unisono.builtin_tools.browser`",
    ),
    "grammar of a custom tool": (
        {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]},
        "tools.0.format: no effect",
    ),
}


@pytest.mark.parametrize(("fields", "note"), NOTED.values(), ids=NOTED)
def test_fields_without_effect_are_noted(fields: dict[str, Any], note: str) -> None:
    assert generation_of(**fields).notes == (note,)


@pytest.mark.parametrize("spelling", EFFORTS)
def test_every_spelling_of_effort_is_accepted(spelling: str) -> None:
    assert generation_of(reasoning={"effort": spelling}).request.conversation.preamble.effort is EFFORTS[spelling]


def test_sampling_reaches_the_engine_and_the_echo() -> None:
    request = ResponsesRequest.model_validate(
        {"model": "m", "input": "Hi", "temperature": 0.5, "top_p": 0.9, "presence_penalty": 1}
    )
    generation = generation_of(temperature=0.5, top_p=0.9, presence_penalty=1, seed=7, max_output_tokens=9)
    assert generation.request.answer.sampling == Sampling(temperature=0.5, top_p=0.9, presence_penalty=1, seed=7)
    assert generation.request.answer.max_tokens == 9
    echo = to_echo(request, generation.request.answer.sampling)
    assert (echo["temperature"], echo["top_p"], echo["presence_penalty"]) == (0.5, 0.9, 1)


FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"calls_allowed": True, "parallel_calls": True, "hold_calls": True, "whole": True}),
    "no calls": ({"tool_choice": "none"}, {"calls_allowed": False}),
    "one call": ({"parallel_tool_calls": False}, {"parallel_calls": False}),
    "stream": ({"stream": True}, {"whole": False}),
}


@pytest.mark.parametrize(("fields", "expected"), FLAGS.values(), ids=FLAGS)
def test_flags_reach_the_generation_request(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    request = generation_of(**fields).request
    assert {name: getattr(request.answer, name) for name in expected} == expected
    assert (request.model, request.origin.tenant, request.origin.request_id) == ("group", "default", "req_1")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_knows_if_the_answer_is_streamed(stream: bool, background: bool) -> None:
    assert generation_of(stream=stream, background=background).request.origin.is_streamed is stream


def test_tools_are_echoed_with_every_field() -> None:
    tools = [
        {"type": "function", "name": "f", "async": True},
        {"type": "function", "function": {"name": "g", "strict": True}},
        {"type": "custom", "name": "free"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h"}]},
        {"type": "web_search", "search_context_size": "low"},
    ]
    request = ResponsesRequest.model_validate({"model": "m", "input": "Hi", "tools": tools})
    plain = {"description": None, "parameters": None, "strict": False}
    assert to_echo(request, Sampling())["tools"] == [
        {"type": "function", "name": "f", **plain, "async": True},
        {"type": "function", "name": "g", **plain, "strict": True},
        {"type": "custom", "name": "free", "description": "", "format": {"type": "text"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h", **plain}]},
        {"type": "web_search", "search_context_size": "low"},
    ]


def test_the_error_for_an_unknown_item_type_lists_all_types() -> None:
    message = refusal_of(**item_input(type="dream")).message
    assert all(kind in message for kind in KINDS)
