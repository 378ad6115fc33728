"""`tool_choice` in every form it comes in, and what the engine is told."""

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
from unisono.core.tools import ToolServer
from unisono.engine.request import AllowedTools, Choice, ForcedCalls, GenerationRequest

F, G = NamedTool("function", "f"), NamedTool("function", "g")
FORMS: dict[str, tuple[Any, ToolChoice]] = {
    # how it is written: (what is sent, what is understood)
    "none": ("none", ToolChoice(ChoiceMode.NONE)),
    "auto": ("auto", ToolChoice(ChoiceMode.AUTO)),
    "required": ("required", ToolChoice(ChoiceMode.REQUIRED)),
    "any, as others call it": ("any", ToolChoice(ChoiceMode.REQUIRED)),
    "a word as a type": ({"type": "required"}, ToolChoice(ChoiceMode.REQUIRED)),
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
    "a tool of OpenAI's": (
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


@pytest.mark.parametrize(("sent", "understood"), FORMS.values(), ids=FORMS)
def test_every_form_is_understood(sent: Any, understood: ToolChoice) -> None:
    assert TypeAdapter(ChosenTools).validate_python(sent) == understood


@pytest.mark.parametrize("choice", [choice for _, choice in FORMS.values()], ids=FORMS)
def test_what_is_repeated_means_the_same(choice: ToolChoice) -> None:
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
    made = to_responses_turn(
        request,
        KnownState(),
        model="m",
        today="2026-11-20",
        caller=Caller("t"),
        request_id="r",
        new_id=ids(),
        servers=(DOCS, WEB),
    )
    return made.request


ALL = {"tools": [tool("f"), tool("g")]}
CHOICES: dict[str, tuple[dict[str, Any], Choice | None]] = {
    "nothing said": ({}, None),
    "auto": ({"tool_choice": "auto"}, None),
    "none": ({"tool_choice": "none"}, None),
    "required": ({"tool_choice": "required"}, ForcedCalls()),
    "named": ({"tool_choice": tool("f")}, ForcedCalls(frozenset({"f"}))),
    "allowed": (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [tool("f")]}},
        AllowedTools(frozenset({"f"})),
    ),
    "one of the allowed": (
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [tool("f"), tool("g")]}},
        ForcedCalls(frozenset({"f", "g"})),
    ),
}


@pytest.mark.parametrize(("fields", "expected"), CHOICES.values(), ids=CHOICES)
def test_a_choice_among_the_clients_own_tools(fields: dict[str, Any], expected: Choice | None) -> None:
    assert chat(**ALL, **fields).request.choice == expected


MCP, SEARCH = {"type": "mcp", "server_label": "docs"}, {"type": "web_search"}
HOSTED: dict[str, tuple[Any, Choice]] = {
    "any": ("required", ForcedCalls()),
    "a server's": ({**MCP, "name": "look"}, ForcedCalls(frozenset(), frozenset({("docs", "look")}))),
    "any of a server's": (MCP, ForcedCalls(frozenset(), frozenset({("docs", None)}))),
    "the web": ({"type": "web_search_preview"}, ForcedCalls(frozenset(), frozenset({("builtin:browser", None)}))),
    "allowed": (
        {"type": "allowed_tools", "mode": "auto", "tools": [MCP, SEARCH, {"type": "file_search"}]},
        AllowedTools(frozenset(), frozenset({("docs", None), ("builtin:browser", None)})),
    ),
}


@pytest.mark.parametrize(("choice", "expected"), HOSTED.values(), ids=HOSTED)
def test_a_choice_among_tools_the_gateway_runs(choice: Any, expected: Choice) -> None:
    assert responses(tools=[MCP, SEARCH, {"type": "file_search"}], tool_choice=choice).choice == expected


def test_a_tool_in_a_namespace_is_found_by_either_name() -> None:
    inside = {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "find"}]}
    for name in ("find", "crm__find"):
        found = responses(tools=[inside], tool_choice={"type": "function", "name": name})
        assert found.choice == ForcedCalls(frozenset({"crm__find"}))


def test_what_the_client_began_is_what_it_is() -> None:
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    wishes = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    asked = chat(**ALL, **wishes, messages=begun)
    assert asked.notes == (
        "tool_choice: no effect, because the client started the answer",
        "response_format: no effect, because the client started the answer",
    )


BUDGETS: dict[str, tuple[dict[str, Any], int | None]] = {
    "none": ({}, None),
    "OpenRouter's": ({"reasoning": {"max_tokens": 5}}, 5),
    "vLLM's": ({"thinking_token_budget": 5}, 5),
    "Qwen's": ({"thinking_budget": 5}, 5),
    "Qwen's in the template": ({"chat_template_kwargs": {"thinking_budget": 5}}, 5),
    "llama.cpp's": ({"reasoning_budget": 5}, 5),
    "Anthropic's": ({"thinking": {"type": "enabled", "budget_tokens": 5}}, 5),
    "no thoughts at all": ({"reasoning": {"max_tokens": 0}}, 0),
    "as many as it takes": ({"reasoning_budget": -1}, None),
    "two of them": ({"thinking_budget": 7, "reasoning": {"max_tokens": 5}}, 5),
}


@pytest.mark.parametrize(("fields", "budget"), BUDGETS.values(), ids=BUDGETS)
def test_a_budget_in_every_spelling(fields: dict[str, Any], budget: int | None) -> None:
    asked = chat(**fields)
    assert asked.request.reasoning_budget == budget
    assert asked.notes == ()


@pytest.mark.parametrize(("asked", "holds"), [(None, 100), (50, 50), (500, 100), (-1, 100)], ids=str)
def test_the_operators_budget_holds_for_everybody(asked: int | None, holds: int) -> None:
    rules = ModelRules(reasoning_budget=100, unmended=frozenset({"repetition"}))
    turn = chat(rules, thinking_token_budget=asked).request
    assert (turn.reasoning_budget, turn.disabled_rules) == (holds, {"repetition"})


def test_thinking_that_is_disabled_is_little() -> None:
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
    "a schema beside the other type": ({"type": "json_object", "schema": SCHEMA}, AnswerForm("response", SCHEMA)),
    "a schema without any": ({"type": "json_schema", "json_schema": {"name": "n"}}, AnswerForm("n")),
}


@pytest.mark.parametrize(("sent", "form"), ANSWERS.values(), ids=ANSWERS)
def test_the_form_of_an_answer(sent: Any, form: AnswerForm | None) -> None:
    assert chat(response_format=sent).request.form == form
    if "json_schema" in sent:
        sent = {"type": "json_schema", **sent["json_schema"]}
    assert responses(text={"format": sent}).form == form


def test_the_response_repeats_what_was_asked() -> None:
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
