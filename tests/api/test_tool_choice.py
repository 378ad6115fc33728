"""`tool_choice`, response formats and reasoning budgets, as the engine receives them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.api.responses.frames import ids
from unisono.api.chat.inbound import ChatGeneration, to_generation_request
from unisono.api.chat.schema import ChatRequest
from unisono.api.model_rules import ModelRules
from unisono.api.responses.inbound import to_generation_request as to_responses_turn
from unisono.api.responses.input_conversion import KnownState
from unisono.api.responses.outbound.response import to_echo
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.tool_choice import ChoiceMode, ChosenTools, NamedTool, ToolChoice
from unisono.core.access import Caller
from unisono.core.conversation import AnswerForm, Effort
from unisono.core.generation import Sampling
from unisono.core.tool_host import ToolServer
from unisono.engine.request import AllowedTools, Choice, ForcedCalls, GenerationRequest

F, G = NamedTool("function", "f"), NamedTool("function", "g")
FORMS: dict[str, tuple[Any, ToolChoice]] = {
    # form: (value in the request, parsed choice)
    "none": ("none", ToolChoice(ChoiceMode.NONE)),
    "auto": ("auto", ToolChoice(ChoiceMode.AUTO)),
    "required": ("required", ToolChoice(ChoiceMode.REQUIRED)),
    "any, an alias of required": ("any", ToolChoice(ChoiceMode.REQUIRED)),
    "a mode as a type": ({"type": "required"}, ToolChoice(ChoiceMode.REQUIRED)),
    "a function": ({"type": "function", "function": {"name": "f"}}, ToolChoice(ChoiceMode.REQUIRED, (F,), one=True)),
    "a function, flat": ({"type": "function", "name": "f"}, ToolChoice(ChoiceMode.REQUIRED, (F,), one=True)),
    "a custom tool": (
        {"type": "custom", "custom": {"name": "f"}},
        ToolChoice(ChoiceMode.REQUIRED, (NamedTool("custom", "f"),), one=True),
    ),
    "a tool of a server": (
        {"type": "mcp", "server_label": "docs", "name": "search"},
        ToolChoice(ChoiceMode.REQUIRED, (NamedTool("mcp", "search", "docs"),), one=True),
    ),
    "any tool of a server": (
        {"type": "mcp", "server_label": "docs"},
        ToolChoice(ChoiceMode.REQUIRED, (NamedTool("mcp", "", "docs"),), one=True),
    ),
    "a built-in tool of OpenAI": (
        {"type": "web_search_preview"},
        ToolChoice(ChoiceMode.REQUIRED, (NamedTool("web_search_preview"),), one=True),
    ),
    "allowed tools of Chat": (
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
        },
        ToolChoice(ChoiceMode.REQUIRED, (F,)),
    ),
    "allowed tools of Responses": (
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": n} for n in "fg"]},
        ToolChoice(ChoiceMode.AUTO, (F, G)),
    ),
}


@pytest.mark.parametrize(("value", "expected"), FORMS.values(), ids=FORMS)
def test_every_form_is_parsed(value: Any, expected: ToolChoice) -> None:
    assert TypeAdapter(ChosenTools).validate_python(value) == expected


@pytest.mark.parametrize("choice", [choice for _, choice in FORMS.values()], ids=FORMS)
def test_the_echoed_choice_parses_to_the_same_choice(choice: ToolChoice) -> None:
    assert TypeAdapter(ChosenTools).validate_python(choice.written()) == choice


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def chat(rules: ModelRules = ModelRules(), **fields: Any) -> ChatGeneration:  # noqa: B008 - it is frozen
    messages = fields.pop("messages", [{"role": "user", "content": "Hi"}])
    request = ChatRequest.model_validate({"model": "m", "messages": messages, **fields})
    return to_generation_request(
        request, model="m", today="2026-11-20", caller=Caller("t"), request_id="r", rules=rules
    )


DOCS = ToolServer("docs", "https://docs.example/mcp")
WEB = ToolServer("builtin:browser", "https://web.example/mcp", builtin="browser")


def responses(**fields: Any) -> GenerationRequest:
    request = ResponsesRequest.model_validate({"model": "m", "input": "Hi", **fields})
    converted = to_responses_turn(
        request,
        KnownState(),
        model="m",
        today="2026-11-20",
        caller=Caller("t"),
        request_id="r",
        new_id=ids(),
        servers=(DOCS, WEB),
    )
    return converted.request


CLIENT_TOOLS = {"tools": [tool("f"), tool("g")]}
CHOICES: dict[str, tuple[dict[str, Any], Choice | None]] = {
    "no tool_choice": ({}, None),
    "auto": ({"tool_choice": "auto"}, None),
    "none": ({"tool_choice": "none"}, None),
    "required": ({"tool_choice": "required"}, ForcedCalls()),
    "named": ({"tool_choice": tool("f")}, ForcedCalls(frozenset({"f"}))),
    "allowed": (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [tool("f")]}},
        AllowedTools(frozenset({"f"})),
    ),
    "required among allowed tools": (
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [tool("f"), tool("g")]}},
        ForcedCalls(frozenset({"f", "g"}), exclusive=True),
    ),
    "required among one allowed tool": (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("f")]}}},
        ForcedCalls(frozenset({"f"}), exclusive=True),
    ),
}


@pytest.mark.parametrize(("fields", "expected"), CHOICES.values(), ids=CHOICES)
def test_a_choice_of_client_tools_reaches_the_engine(fields: dict[str, Any], expected: Choice | None) -> None:
    assert chat(**CLIENT_TOOLS, **fields).request.answer.choice == expected


MCP, SEARCH = {"type": "mcp", "server_label": "docs"}, {"type": "web_search"}
SERVER_TOOL_CHOICES: dict[str, tuple[Any, Choice]] = {
    "any": ("required", ForcedCalls()),
    "tool of a server": ({**MCP, "name": "look"}, ForcedCalls(frozenset(), frozenset({("docs", "look")}))),
    "any tool of one server": (MCP, ForcedCalls(frozenset(), frozenset({("docs", None)}))),
    "web search": ({"type": "web_search_preview"}, ForcedCalls(frozenset(), frozenset({("builtin:browser", None)}))),
    "allowed": (
        {"type": "allowed_tools", "mode": "auto", "tools": [MCP, SEARCH, {"type": "file_search"}]},
        AllowedTools(frozenset(), frozenset({("docs", None), ("builtin:browser", None)})),
    ),
    "required among allowed tools": (
        {"type": "allowed_tools", "mode": "required", "tools": [{**MCP, "name": "look"}]},
        ForcedCalls(frozenset(), frozenset({("docs", "look")}), exclusive=True),
    ),
}


@pytest.mark.parametrize(("choice", "expected"), SERVER_TOOL_CHOICES.values(), ids=SERVER_TOOL_CHOICES)
def test_a_choice_of_server_tools_reaches_the_engine(choice: Any, expected: Choice) -> None:
    assert responses(tools=[MCP, SEARCH, {"type": "file_search"}], tool_choice=choice).answer.choice == expected


def test_a_tool_in_a_namespace_is_found_by_either_name() -> None:
    namespace = {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "find"}]}
    for name in ("find", "crm__find"):
        request = responses(tools=[namespace], tool_choice={"type": "function", "name": name})
        assert request.answer.choice == ForcedCalls(frozenset({"crm__find"}))


PREFILLED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]


def test_a_prefilled_answer_ignores_forced_calls_and_response_format() -> None:
    fields = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    generation = chat(**CLIENT_TOOLS, **fields, messages=PREFILLED)
    assert generation.notes == (
        "tool_choice: no call is required, because the client started the answer",
        "response_format: no effect, because the client started the answer",
    )


FORM_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "vLLM's": ({"structured_outputs": {"choice": ["yes", "no"]}}, "structured_outputs.choice"),
    "vLLM's earlier": ({"guided_regex": "[a-z]+"}, "guided_regex"),
    "SGLang's": ({"regex": "[a-z]+"}, "regex"),
}


@pytest.mark.parametrize(("fields", "path"), FORM_FIELDS.values(), ids=FORM_FIELDS)
def test_the_note_on_a_prefilled_answer_names_the_field_of_the_form(fields: dict[str, Any], path: str) -> None:
    assert chat(**fields, messages=PREFILLED).notes == (f"{path}: no effect, because the client started the answer",)


def test_allowed_tools_have_an_effect_on_a_prefilled_answer() -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert chat(**CLIENT_TOOLS, tool_choice=choice, messages=PREFILLED).notes == ()


BUDGETS: dict[str, tuple[dict[str, Any], int | None]] = {
    "none": ({}, None),
    "OpenRouter's": ({"reasoning": {"max_tokens": 5}}, 5),
    "vLLM's": ({"thinking_token_budget": 5}, 5),
    "Qwen's": ({"thinking_budget": 5}, 5),
    "Qwen's in the template": ({"chat_template_kwargs": {"thinking_budget": 5}}, 5),
    "llama.cpp's": ({"reasoning_budget": 5}, 5),
    "Anthropic's": ({"thinking": {"type": "enabled", "budget_tokens": 5}}, 5),
    "no reasoning": ({"reasoning": {"max_tokens": 0}}, 0),
    "unlimited": ({"reasoning_budget": -1}, None),
    "two budgets": ({"thinking_budget": 7, "reasoning": {"max_tokens": 5}}, 5),
}


@pytest.mark.parametrize(("fields", "budget"), BUDGETS.values(), ids=BUDGETS)
def test_a_reasoning_budget_is_read_in_every_spelling(fields: dict[str, Any], budget: int | None) -> None:
    generation = chat(**fields)
    assert generation.request.answer.reasoning_budget == budget
    assert generation.notes == ()


@pytest.mark.parametrize(("requested", "effective"), [(None, 100), (50, 50), (500, 100), (-1, 100)], ids=str)
def test_the_operators_reasoning_budget_is_an_upper_limit(requested: int | None, effective: int) -> None:
    rules = ModelRules(reasoning_budget=100, unmended=frozenset({"repetition"}))
    request = chat(rules, thinking_token_budget=requested).request
    assert (request.answer.reasoning_budget, request.answer.disabled_rules) == (effective, {"repetition"})


def test_disabled_thinking_is_low_effort() -> None:
    assert chat(thinking={"type": "disabled"}).request.conversation.preamble.effort is Effort.LOW


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
ANSWERS: dict[str, tuple[Any, AnswerForm | None]] = {
    "text": ({"type": "text"}, None),
    "any object": ({"type": "json_object"}, AnswerForm("response")),
    "a schema": (
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "description": "What it is."}},
        AnswerForm("n", SCHEMA, "What it is."),
    ),
    "a strict schema": (
        {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object", "additionalProperties": False}, "strict": True},
        },
        AnswerForm("n", {"type": "object", "additionalProperties": False}, strict=True),
    ),
    "a schema, flat": ({"type": "json_schema", "name": "n", "schema": SCHEMA}, AnswerForm("n", SCHEMA)),
    "a schema beside json_object": ({"type": "json_object", "schema": SCHEMA}, AnswerForm("response", SCHEMA)),
    "json_schema without a schema": ({"type": "json_schema", "json_schema": {"name": "n"}}, AnswerForm("n")),
}


@pytest.mark.parametrize(("response_format", "form"), ANSWERS.values(), ids=ANSWERS)
def test_response_formats_become_answer_forms(response_format: Any, form: AnswerForm | None) -> None:
    assert chat(response_format=response_format).request.answer.form == form
    if "json_schema" in response_format:
        response_format = {"type": "json_schema", **response_format["json_schema"]}
    assert responses(text={"format": response_format}).answer.form == form


def test_the_response_echoes_the_requested_settings() -> None:
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "name": "f"}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "reasoning": {"max_tokens": 7},
    }
    request = ResponsesRequest.model_validate({"model": "m", "input": "Hi", **fields})
    echo = to_echo(request, Sampling())
    assert echo["tool_choice"] == {"type": "function", "name": "f"}
    assert echo["text"]["format"] == {
        "type": "json_schema",
        "name": "n",
        "description": None,
        "schema": SCHEMA,
        "strict": False,
    }
    assert echo["reasoning"] == {"effort": "medium", "summary": None, "max_tokens": 7}
