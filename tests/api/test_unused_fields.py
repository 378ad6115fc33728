"""Notes on unused fields, wherever they are in a request."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from unisono.api.chat.schema import ChatRequest
from unisono.api.completions.schema import CompletionRequest
from unisono.api.messages.schema import MessagesRequest
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.structured_outputs import refuse_forms
from unisono.api.unused_fields import notes_on_unused
from unisono.errors import UnsupportedValue

MESSAGES = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
BODIES: dict[type[Any], dict[str, Any]] = {
    ChatRequest: {"messages": MESSAGES},
    ResponsesRequest: {"input": "Hi"},
    MessagesRequest: {"messages": MESSAGES, "max_tokens": 9},
    CompletionRequest: {"prompt": "Hi"},
}


def notes(kind: type[Any], **fields: Any) -> list[str]:
    return [*notes_on_unused(kind.model_validate({"model": "gpt-oss", **BODIES[kind], **fields}))]


@pytest.mark.parametrize("value", [False, 0, "", [], {}, "yes", 1], ids=repr)
@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_every_value_except_null_is_noted(kind: type[Any], value: Any) -> None:
    assert notes(kind, made_up=value) == ["made_up: no effect"]
    assert notes(kind, made_up=None) == []


@pytest.mark.parametrize(
    ("kind", "fields", "paths"),
    [
        (ChatRequest, {"stream_options": {"made_up": 0}}, ["stream_options.made_up"]),
        (ChatRequest, {"response_format": {"type": "text", "made_up": 0}}, ["response_format.made_up"]),
        (
            ChatRequest,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "made_up": 0}}},
            ["response_format.json_schema.made_up"],
        ),
        (ChatRequest, {"functions": [{**FUNCTION, "made_up": 0}]}, ["functions.0.made_up"]),
        (
            ChatRequest,
            {"tools": [{"type": "function", "function": {**FUNCTION, "inner": 0}, "outer": 0}]},
            ["tools.0.outer", "tools.0.function.inner"],
        ),
        (ChatRequest, {"structured_outputs": {"json": {}, "made_up": 0}}, ["structured_outputs.made_up"]),
        (ResponsesRequest, {"tools": [{"type": "function", **FUNCTION, "made_up": 0}]}, ["tools.0.made_up"]),
        (
            ResponsesRequest,
            {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function", **FUNCTION, "made_up": 0}]}]},
            ["tools.0.tools.0.made_up"],
        ),
        (ResponsesRequest, {"tools": [{"type": "apply_patch", "made_up": 0}]}, ["tools.0.made_up"]),
        (ResponsesRequest, {"tools": [{"type": "mcp", "server_label": "a", "made_up": 0}]}, ["tools.0.made_up"]),
        (
            ResponsesRequest,
            {"tools": [{"type": "mcp", "server_label": "a", "allowed_tools": {"read_only": True, "made_up": 0}}]},
            ["tools.0.allowed_tools.made_up"],
        ),
        (ResponsesRequest, {"text": {"format": {"type": "text", "made_up": 0}}}, ["text.format.made_up"]),
        (ResponsesRequest, {"conversation": {"id": "conv_1", "made_up": 0}}, ["conversation.made_up"]),
        (MessagesRequest, {"metadata": {"made_up": 0}}, ["metadata.made_up"]),
        (MessagesRequest, {"tool_choice": {"type": "auto", "made_up": 0}}, ["tool_choice.made_up"]),
        (
            MessagesRequest,
            {"tools": [{"name": "look", "input_schema": {}, "cache_control": {"type": "ephemeral"}, "made_up": 0}]},
            ["tools.0.made_up"],
        ),
        (MessagesRequest, {"tools": [{"type": "bash_20250124", "name": "bash", "strict": False}]}, ["tools.0.strict"]),
        (
            MessagesRequest,
            {"tools": [{"type": "mcp_toolset", "mcp_server_name": "a", "configs": {"b": {"defer_loading": False}}}]},
            ["tools.0.configs.b.defer_loading"],
        ),
        (
            MessagesRequest,
            {"mcp_servers": [{"name": "a", "url": "http://a", "tool_configuration": {"made_up": 0}}]},
            ["mcp_servers.0.tool_configuration.made_up"],
        ),
        (
            MessagesRequest,
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "made_up": 0}]}},
            ["context_management.edits.0.made_up"],
        ),
    ],
)
def test_fields_of_inner_objects_are_noted_with_their_paths(
    kind: type[Any], fields: dict[str, Any], paths: list[str]
) -> None:
    assert notes(kind, **fields) == [f"{path}: no effect" for path in paths]


def test_notes_have_the_order_of_the_fields_in_the_schema() -> None:
    inner = {"made_up": 0}
    sent = {"stream_options": inner, "response_format": {"type": "text", **inner}, "reasoning": inner}
    expected = [f"{name}.made_up: no effect" for name in ChatRequest.model_fields if name in sent]
    assert len(expected) == len(sent)
    for names in permutations(sent):
        assert notes(ChatRequest, **{name: sent[name] for name in names}) == expected


def test_the_same_field_of_many_tools_has_one_note() -> None:
    tools = [{"type": "function", **FUNCTION, "name": f"look_{number}", "async": True} for number in range(100)]
    assert notes(ResponsesRequest, tools=tools[:2]) == ["tools.0.async: no effect, also at 1 more place"]
    assert notes(ResponsesRequest, tools=tools) == ["tools.0.async: no effect, also at 99 more places"]


def test_histories_are_read_elsewhere() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi", "made_up": 0}], "made_up": 0}]
    assert notes(MessagesRequest, messages=messages, system=[{"type": "text", "text": "Hi", "made_up": 0}]) == []


FORMS: list[dict[str, Any]] = [
    {"guided_json": {"type": "object"}},
    {"guided_choice": ["yes", "no"]},
    {"structured_outputs": {"regex": "a"}},
    {"response_format": {"type": "json_object"}},
    {"grammar": 'root ::= "a"'},
]


@pytest.mark.parametrize("kind", [ResponsesRequest, MessagesRequest], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_a_form_in_a_field_of_another_api_is_refused(kind: type[Any], form: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedValue) as refused:
        refuse_forms(kind.model_validate({"model": "gpt-oss", **BODIES[kind], **form}), "use another field")
    assert refused.value.param == next(iter(form))


def test_a_field_that_requires_no_form_is_not_refused() -> None:
    fields = {"response_format": {"type": "text"}, "structured_outputs": {}, "guided_choice": []}
    refuse_forms(ResponsesRequest.model_validate({"model": "gpt-oss", "input": "Hi", **fields}), "")
