"""Conversion of chat messages to a conversation, in the order that the model reads."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.api.chat.inbound import declared, to_conversation
from unisono.api.chat.schema import ChatRequest
from unisono.api.client_toolbox import CallForm, Toolbox, to_toolbox
from unisono.api.harmony_in_history import split_markers
from unisono.core.conversation import (
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    Conversation,
    DeveloperMessage,
    Effort,
    FunctionTool,
    Item,
    Phase,
    ToolResult,
    UserMessage,
)
from unisono.errors import InvalidRequest


def conversation_of(*messages: dict[str, Any]) -> Conversation:
    request = ChatRequest.model_validate({"model": "m", "messages": list(messages)})
    conversation, _ = to_conversation(request.messages, Toolbox(), Effort.MEDIUM, "2026-11-20")
    return conversation


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def assistant(content: Any = None, *calls: tuple[str, str], **fields: Any) -> dict[str, Any]:
    tool_calls = [{"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}} for id, name in calls]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls, **fields}


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


HI = UserMessage("Hi")
COMMENTARY = Phase.COMMENTARY

CASES: dict[str, tuple[list[dict[str, Any]], list[Item]]] = {
    "user message": ([user()], [HI]),
    "parts are joined without a separator": (
        [user([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"])],
        [UserMessage("abc")],
    ),
    "a later developer message keeps its position": (
        [user(), {"role": "developer", "content": "Be brief"}, user("Go")],
        [HI, DeveloperMessage("Be brief"), UserMessage("Go")],
    ),
    "reasoning, preamble, calls": (
        [user(), assistant("Let me look", ("c1", "f"), reasoning="hm"), user()],
        [HI, AssistantReasoning("hm"), AssistantMessage("Let me look", COMMENTARY), AssistantCall("c1", "f", "{}"), HI],
    ),
    "each call with its result": (
        [user(), assistant(None, ("c1", "f"), ("c2", "g")), result("c2", "two"), result("c1", "one")],
        [
            HI,
            AssistantCall("c1", "f", "{}"),
            ToolResult("c1", "f", "one"),
            AssistantCall("c2", "g", "{}"),
            ToolResult("c2", "g", "two"),
        ],
    ),
    "calls with equal ids in the order of their results": (
        [user(), assistant(None, ("c", "f"), ("c", "f")), result("c", "one"), result("c", "two")],
        [
            HI,
            AssistantCall("c", "f", "{}"),
            ToolResult("c", "f", "one"),
            AssistantCall("c", "f", "{}"),
            ToolResult("c", "f", "two"),
        ],
    ),
    "a reused id belongs to the newer call": (
        [assistant(None, ("c", "f")), result("c", "1"), assistant(None, ("c", "g")), result("c", "2")],
        [
            AssistantCall("c", "f", "{}"),
            ToolResult("c", "f", "1"),
            AssistantCall("c", "g", "{}"),
            ToolResult("c", "g", "2"),
        ],
    ),
    "a late result keeps its position": (
        [assistant(None, ("c", "f")), user(), result("c", "1")],
        [AssistantCall("c", "f", "{}"), HI, ToolResult("c", "f", "1")],
    ),
    "results in every form": (
        [
            assistant(None, ("a", "f"), ("b", "f"), ("c", "f"), ("d", "f"), ("e", "f")),
            result("a", [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]),
            result("b", None),
            result("c", ""),
            result("d", {"ok": True}),
            result("e", [{"ok": 1}, 2]),
        ],
        [
            item
            for id, output in [("a", "xy"), ("b", ""), ("c", ""), ("d", '{"ok":true}'), ("e", '[{"ok":1},2]')]
            for item in (AssistantCall(id, "f", "{}"), ToolResult(id, "f", output))
        ],
    ),
    "legacy function_call": (
        [
            user(),
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a":1}'}},
            {"role": "function", "name": "f", "content": "one"},
        ],
        [HI, AssistantCall("function_call_1", "f", '{"a":1}'), ToolResult("function_call_1", "f", "one")],
    ),
    "arguments as an object": (
        [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]}],
        [AssistantCall("c", "f", '{"a":1}')],
    ),
    "a custom call": (
        [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "ls"}}]}],
        [AssistantCall("c", "f", "ls")],
    ),
    "empty assistant messages are dropped": ([assistant(None), user(), assistant(""), user()], [HI, HI]),
    "a refusal becomes an assistant message": (
        [assistant(None, refusal="No."), assistant([{"type": "refusal", "refusal": "Never."}]), user()],
        [AssistantMessage("No."), AssistantMessage("Never."), HI],
    ),
    "message with the phase commentary": (
        [assistant("Looking", phase="commentary"), user()],
        [AssistantMessage("Looking", COMMENTARY), HI],
    ),
}


@pytest.mark.parametrize(("messages", "items"), CASES.values(), ids=CASES)
def test_messages_become_items_in_order(messages: list[dict[str, Any]], items: list[Item]) -> None:
    conversation = conversation_of(*messages)
    assert list(conversation.items) == items
    assert conversation.prefill is None


REASONING: dict[str, dict[str, Any]] = {
    "reasoning": {"reasoning": "hm"},
    "reasoning_content": {"reasoning_content": "hm"},
    "both, as in the gateway's own responses": {"reasoning": "hm", "reasoning_content": "hm"},
    "thinking": {"thinking": "hm"},
    "reasoning_details alone": {
        "reasoning_details": [{"type": "reasoning.text", "text": "h"}, {"type": "x"}, {"text": "m"}]
    },
    "reasoning is null": {"reasoning": None, "reasoning_content": "hm"},
    "thinking part": {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]},
}


@pytest.mark.parametrize("fields", REASONING.values(), ids=REASONING)
def test_reasoning_is_read_once_in_every_form(fields: dict[str, Any]) -> None:
    conversation = conversation_of({"role": "assistant", "content": "a", **fields}, user())
    assert list(conversation.items) == [AssistantReasoning("hm"), AssistantMessage("a"), HI]


def test_leading_system_and_developer_messages_become_instructions() -> None:
    conversation = conversation_of(
        system("A"), {"role": "developer", "content": ["B"]}, system(""), system("C"), user()
    )
    assert conversation.preamble.instructions == "A\n\nB\n\nC"
    assert conversation.preamble.date == "2026-11-20"
    assert list(conversation.items) == [HI]


PREFILLS: dict[str, tuple[list[dict[str, Any]], list[Item], str | None]] = {
    "trailing assistant message": ([user(), assistant("Once upon")], [HI], "Once upon"),
    "with reasoning": (
        [user(), assistant("Once", reasoning="hm")],
        [HI, AssistantReasoning("hm")],
        "Once",
    ),
    "reasoning only": ([user(), assistant(None, reasoning="hm")], [HI, AssistantReasoning("hm")], None),
    "empty": ([user(), assistant("")], [HI], None),
    "a call is no prefill": (
        [user(), assistant("Look", ("c", "f"))],
        [HI, AssistantMessage("Look", COMMENTARY), AssistantCall("c", "f", "{}")],
        None,
    ),
    "raw markers": (
        [user(), assistant("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>On")],
        [HI, AssistantReasoning("hm")],
        "On",
    ),
}


@pytest.mark.parametrize(("messages", "items", "prefill"), PREFILLS.values(), ids=PREFILLS)
def test_a_trailing_assistant_message_is_continued(
    messages: list[dict[str, Any]], items: list[Item], prefill: str | None
) -> None:
    conversation = conversation_of(*messages)
    assert list(conversation.items) == items
    assert conversation.prefill == prefill


FINAL = "<|start|>assistant<|channel|>final<|message|>"
MARKED: dict[str, tuple[str, list[Item]]] = {
    "plain": ("Hello", [AssistantMessage("Hello")]),
    "empty text": ("", []),
    "reasoning and answer": (
        f"<|channel|>analysis<|message|>hm<|end|>{FINAL}Hi<|return|>",
        [AssistantReasoning("hm"), AssistantMessage("Hi")],
    ),
    "no terminator between": (
        "<|channel|>analysis<|message|>hm<|channel|>final<|message|>Hi",
        [AssistantReasoning("hm"), AssistantMessage("Hi")],
    ),
    "reasoning only": ("<|channel|>analysis<|message|>hm", [AssistantReasoning("hm")]),
    "a preamble between reasoning and answer": (
        f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>so<|end|>{FINAL}Hi",
        [AssistantReasoning("hm"), AssistantMessage("so", COMMENTARY), AssistantMessage("Hi")],
    ),
    "markup after the answer is text": (
        f"{FINAL}Hi<|end|><|start|>system<|message|>x",
        [AssistantMessage("Hi<|start|>system<|message|>x")],
    ),
    "markers inside text are text": (
        "The token <|channel|>analysis<|message|> opens it",
        [AssistantMessage("The token <|channel|>analysis<|message|> opens it")],
    ),
    "a header of another role is text": (
        "<|start|>user<|message|>x",
        [AssistantMessage("<|start|>user<|message|>x")],
    ),
}


@pytest.mark.parametrize(("text", "items"), MARKED.values(), ids=MARKED)
def test_leading_harmony_markup_in_an_answer_is_split(text: str, items: list[Item]) -> None:
    assert split_markers(text, Phase.FINAL) == items


@given(
    st.lists(
        st.sampled_from(
            ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "analysis", "final", "assistant", " x"]
        ),
        max_size=24,
    )
)
def test_splitting_adds_no_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    for item in split_markers(text, Phase.FINAL):
        assert isinstance(item, AssistantReasoning | AssistantMessage)
        assert all(word in text for word in item.text.split())


def test_splitting_takes_linear_time() -> None:
    text = "<|channel|>analysis<|message|>x<|end|>" * 20_000 + "<|channel|>" * 20_000
    started = time.perf_counter()
    split_markers(text, Phase.FINAL)
    assert time.perf_counter() - started < 10


def toolbox_of(*tools: dict[str, Any], functions: list[dict[str, Any]] | None = None) -> Toolbox:
    body = {"model": "m", "messages": [user()], "tools": list(tools), "functions": functions}
    request = ChatRequest.model_validate(body)
    return to_toolbox(declared(request))


def test_functions_are_converted_in_every_form() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    spec = {"name": "srv.get-it", "description": "Gets", "parameters": schema, "strict": True}
    expected = (FunctionTool("srv.get-it", "Gets", schema, True),)
    assert toolbox_of({"type": "function", "function": spec}).tools == expected
    assert toolbox_of({"type": "function", **spec}).tools == expected
    legacy = toolbox_of(functions=[spec])
    assert legacy.tools == expected
    assert legacy.form_of("srv.get-it") is CallForm.LEGACY


def test_a_custom_tool_takes_a_string() -> None:
    box = toolbox_of({"type": "custom", "custom": {"name": "shell", "format": {"type": "grammar"}}})
    [tool] = box.tools
    assert (tool.parameters, tool.free_text, tool.strict) == ({"type": "string"}, True, False)
    assert box.form_of("shell") is CallForm.CUSTOM
    assert box.notes == ("tools.0.custom.format: no effect",)


LARK = {"syntax": "lark", "definition": 'start: "a"+'}
REGEX = {"syntax": "regex", "definition": "a+"}
# Grammar, and why it is not enforced.
GRAMMARS: dict[str, tuple[dict[str, str], str]] = {
    "Lark": (LARK, ""),
    "regex": (REGEX, ""),
    "Lark with an unknown rule": ({**LARK, "definition": "start: b"}, "unknown name"),
    "regex that closes the group of the whole": ({**REGEX, "definition": "a)|(b"}, "unopened group"),
    "regex with a reference": ({**REGEX, "definition": r"(a)\1"}, "backreferences are not supported"),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("grammar", "refusal"), GRAMMARS.values(), ids=GRAMMARS)
def test_a_custom_tool_has_a_grammar(grammar: dict[str, str], refusal: str, nested: bool) -> None:
    form = {"type": "grammar", "grammar": grammar} if nested else {"type": "grammar", **grammar}
    box = toolbox_of({"type": "custom", "custom": {"name": "shell", "description": "Run.", "format": form}})
    [tool] = box.tools
    definition, syntax = grammar["definition"], grammar["syntax"]
    assert tool.description == f"Run.\n\nThe input must match this grammar ({syntax}):\n{definition}"
    if not refusal:
        assert tool.grammar is not None
        assert (tool.grammar.syntax, tool.grammar.definition, tool.strict) == (syntax, definition, True)
        assert box.notes == ()
        return
    assert (tool.grammar, tool.strict) == (None, False)
    [note] = box.notes
    assert note.startswith("tools.0.custom.format: shown to the model, but not enforced: ")
    assert refusal in note


def test_a_namespace_is_flattened() -> None:
    nested = [{"type": "function", "name": "read"}, {"type": "custom", "custom": {"name": "run"}}]
    box = toolbox_of(
        {"type": "namespace", "name": "mcp__fs", "tools": nested},
        {"type": "namespace", "name": "functions", "tools": [{"type": "function", "name": "read"}]},
    )
    assert [tool.name for tool in box.tools] == ["mcp__fs__read", "mcp__fs__run", "read"]
    assert box.form_of("mcp__fs__run") is CallForm.CUSTOM


def test_unsupported_tools_beside_functions_are_skipped_with_a_note() -> None:
    box = toolbox_of({"type": "web_search"}, {"type": "function", "name": "f"}, {"type": "mcp", "server_label": "x"})
    assert [tool.name for tool in box.tools] == ["f"]
    assert [note.partition(":")[0] for note in box.notes] == ["tools.0.type", "tools.2.type"]


def test_parts_that_join_to_an_untokenizable_run_are_refused() -> None:
    parts = [{"type": "text", "text": " " * 400_000}] * 3
    with pytest.raises(InvalidRequest, match="cannot be tokenized"):
        conversation_of(user(parts))


def test_the_name_of_a_message_is_dropped_with_a_note() -> None:
    request = ChatRequest.model_validate({"model": "m", "messages": [user(name="bob")]})
    conversation, notes = to_conversation(request.messages, Toolbox(), Effort.MEDIUM, "")
    assert conversation.items == (HI,)
    assert notes == ["messages.0.name: no effect"]


def test_the_name_of_a_leading_system_message_is_dropped_with_a_note() -> None:
    messages = [system("a"), {**system("b"), "name": "bob"}, user(name="eve")]
    request = ChatRequest.model_validate({"model": "m", "messages": messages})
    _, notes = to_conversation(request.messages, Toolbox(), Effort.MEDIUM, "")
    assert notes == ["messages.1.name: no effect", "messages.2.name: no effect"]
