"""Conversion of Messages requests to generation requests: conversation, tools, settings."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.api.messages.mounted import SEALER
from unisono.api.error_responses import failure_of
from unisono.api.gateway_tools import RunnableTools
from unisono.api.input_files import quoted_file
from unisono.api.media_replacement import LINE
from unisono.api.messages.inbound import MessagesGeneration, MessagesModel, Thinking, needs_seals, to_generation_request
from unisono.api.messages.schema import MessagesRequest
from unisono.api.messages.server_tools import SEALED
from unisono.api.model_rules import ModelRules
from unisono.core.access import Caller
from unisono.core.conversation import (
    SUMMARY_HEADING,
    AddedTools,
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    DeveloperMessage,
    Effort,
    FunctionTool,
    Item,
    Phase,
    ToolResult,
    UserMessage,
)
from unisono.core.tool_approvals import Approval
from unisono.core.tool_host import ToolNames, ToolServer
from unisono.engine.request import ForcedCalls
from unisono.errors import UnisonoError

Json = dict[str, Any]
TENANT = "team"
MODEL = MessagesModel("gpt-oss")
QUESTION: Json = {"role": "user", "content": "Hi"}
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2, "allowed_domains": ["a.example"]}
BROWSER = {"browser": ToolServer("pages", "https://pages.example", approval=Approval(otherwise=False))}
REASONING_TEXT = "Let me see."
USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "it"}}
CALL = AssistantCall("call_1", "look", '{"at":"it"}')


def generation_of(model: MessagesModel = MODEL, **fields: Any) -> MessagesGeneration:
    request = MessagesRequest.model_validate({"model": "m", "max_tokens": 100, "messages": [QUESTION], **fields})
    return to_generation_request(
        request,
        model=model,
        today="2026-11-20",
        caller=Caller(TENANT),
        request_id="req_1",
        seals=SEALER if needs_seals(request) else None,
    )


def items_of(*messages: Json) -> tuple[Item, ...]:
    return generation_of(messages=list(messages)).request.conversation.items


def assistant(*blocks: Any) -> Json:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: Any) -> Json:
    return {"role": "user", "content": list(blocks)}


def text(words: str, **more: Any) -> Json:
    return {"type": "text", "text": words, **more}


def result(call_id: str, **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": call_id, **more}


def thinking(words: str = REASONING_TEXT) -> Json:
    return {"type": "thinking", "thinking": words, "signature": SEALER.sign(TENANT, words)}


OMITTED = {
    "type": "thinking",
    "thinking": "",
    "signature": SEALER.seal(TENANT, [AssistantReasoning(REASONING_TEXT, (1, 2))]),
}
REDACTED = {"type": "redacted_thinking", "data": OMITTED["signature"]}
SEARCHED = AssistantCall("call_s", "browser.search", '{"query": "x"}', (3, 4))
FOUND = ToolResult("call_s", "browser.search", "[0] What was found")
WEB = [
    {"type": "server_tool_use", "id": "srvtoolu_s", "name": "web_search", "input": {"query": "x"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "srvtoolu_s",
        "content": [{"type": "web_search_result", "title": "T", "url": "https://t.example", SEALED: "other"}],
    },
]
SEALED_WEB = [WEB[0], {**WEB[1], "content": [{**WEB[1]["content"][0], SEALED: SEALER.seal(TENANT, [SEARCHED, FOUND])}]}]

FETCHED_PDF = {
    "type": "web_fetch_result",
    "url": "https://t.example",
    "content": {"type": "document", "title": "Paper", "source": {"type": "base64", "data": "JVBERi0="}},
}
TAB = {"title": "T"}


def addition(name: str) -> Json:
    return {"type": "tool_addition", "tool": {"type": "tool_reference", "name": name}}


def removal(name: str) -> Json:
    return {**addition(name), "type": "tool_removal"}


CONVERSATIONS: dict[str, tuple[list[Json], list[Item]]] = {
    "a string": ([QUESTION], [UserMessage("Hi")]),
    "texts": ([user(text("One"), text("Two", cache_control={"type": "ephemeral"}))], [UserMessage("One\n\nTwo")]),
    "empty content": ([user(), QUESTION], [UserMessage(""), UserMessage("Hi")]),
    "an answer": (
        [QUESTION, {"role": "assistant", "content": "Hello."}, QUESTION],
        [UserMessage("Hi"), AssistantMessage("Hello."), UserMessage("Hi")],
    ),
    "a preamble and an answer": (
        [QUESTION, assistant(text("I look."), text("It is so.")), QUESTION],
        [
            UserMessage("Hi"),
            AssistantMessage("I look.", Phase.COMMENTARY),
            AssistantMessage("It is so."),
            UserMessage("Hi"),
        ],
    ),
    "blocks of other servers": (
        [
            QUESTION,
            assistant({"type": "compaction", "content": "We met."}, {"type": "fallback"}, text("It is so.")),
            QUESTION,
            assistant({"type": "compaction", "content": None}, {"type": "mcp_tool_listing"}),
            QUESTION,
        ],
        [
            UserMessage(SUMMARY_HEADING + "We met."),
            AssistantMessage("It is so."),
            UserMessage("Hi"),
            UserMessage("Hi"),
        ],
    ),
    "a sealed result without its call": (
        [QUESTION, assistant(text("I look."), SEALED_WEB[1], text("It is so.")), QUESTION],
        [
            UserMessage("Hi"),
            AssistantMessage("I look.", Phase.COMMENTARY),
            SEARCHED,
            FOUND,
            AssistantMessage("It is so."),
            UserMessage("Hi"),
        ],
    ),
    "an answer in parts with citations": (
        [
            QUESTION,
            assistant(text("It is ", citations=None), text("so.", citations=[{"type": "char_location"}])),
            QUESTION,
        ],
        [UserMessage("Hi"), AssistantMessage("It is so."), UserMessage("Hi")],
    ),
    "thinking, a call and its result": (
        [QUESTION, assistant(thinking(), text("I look."), USE), user(result("toolu_1", content="seen"))],
        [
            UserMessage("Hi"),
            AssistantReasoning(REASONING_TEXT),
            AssistantMessage("I look.", Phase.COMMENTARY),
            CALL,
            ToolResult("call_1", "look", "seen"),
        ],
    ),
    "omitted thinking": (
        [QUESTION, assistant(OMITTED, USE), user(result("toolu_1"))],
        [UserMessage("Hi"), AssistantReasoning(REASONING_TEXT, (1, 2)), CALL, ToolResult("call_1", "look", "")],
    ),
    "redacted thinking": (
        [QUESTION, assistant(REDACTED, USE), user(result("toolu_1"))],
        [UserMessage("Hi"), AssistantReasoning(REASONING_TEXT, (1, 2)), CALL, ToolResult("call_1", "look", "")],
    ),
    "results in any order, then text": (
        [
            QUESTION,
            assistant(USE, thinking(), {**USE, "id": "toolu_2"}),
            user(text("And?"), result("toolu_2", content=[text("b"), text("c")]), result("toolu_1", content="a")),
        ],
        [
            UserMessage("Hi"),
            CALL,
            ToolResult("call_1", "look", "a"),
            AssistantReasoning(REASONING_TEXT),
            AssistantCall("call_2", "look", '{"at":"it"}'),
            ToolResult("call_2", "look", "b\n\nc"),
            UserMessage("And?"),
        ],
    ),
    "failed results": (
        [
            QUESTION,
            assistant(USE, {**USE, "id": "toolu_2"}, {**USE, "id": "toolu_3"}),
            user(
                result("toolu_1", is_error=True),
                result("toolu_2", is_error=True, content="no such file"),
                result("toolu_3", is_error=True, content="error: none"),
            ),
        ],
        [
            UserMessage("Hi"),
            CALL,
            ToolResult("call_1", "look", "Error"),
            AssistantCall("call_2", "look", '{"at":"it"}'),
            ToolResult("call_2", "look", "Error: no such file"),
            AssistantCall("call_3", "look", '{"at":"it"}'),
            ToolResult("call_3", "look", "error: none"),
        ],
    ),
    "foreign call ids": (
        [QUESTION, assistant({**USE, "id": "x-1"}), user(result("x-1", content="seen"))],
        [UserMessage("Hi"), AssistantCall("x-1", "look", '{"at":"it"}'), ToolResult("x-1", "look", "seen")],
    ),
    "arguments that are not an object": (
        [QUESTION, assistant({**USE, "input": {"unparsed_arguments": '{"at'}}), user(result("toolu_1"))],
        [UserMessage("Hi"), AssistantCall("call_1", "look", '{"at'), ToolResult("call_1", "look", "")],
    ),
    "documents and search results": (
        [
            user(
                {
                    "type": "document",
                    "title": "D",
                    "source": {"type": "text", "media_type": "text/plain", "data": "It"},
                },
                {"type": "document", "source": {"type": "content", "content": "that"}},
                {"type": "search_result", "title": "S", "source": "https://s.example", "content": [text("found")]},
            )
        ],
        [UserMessage(f"{quoted_file('D', 'It')}\n\n{quoted_file('', 'that')}\n\nS\nhttps://s.example\nfound")],
    ),
    "a search by another server": (
        [QUESTION, assistant(text("I look."), *WEB, text("It is so.")), QUESTION],
        [
            UserMessage("Hi"),
            AssistantMessage("I look.", Phase.COMMENTARY),
            AssistantCall("call_s", "web_search", '{"query":"x"}'),
            ToolResult("call_s", "web_search", "T\nhttps://t.example"),
            AssistantMessage("It is so."),
            UserMessage("Hi"),
        ],
    ),
    "a search by this gateway": (
        [QUESTION, assistant(*SEALED_WEB, text("It is so.")), QUESTION],
        [UserMessage("Hi"), SEARCHED, FOUND, AssistantMessage("It is so."), UserMessage("Hi")],
    ),
    "a search without hits": (
        [
            QUESTION,
            assistant(WEB[0], {**WEB[1], "content": [], SEALED: SEALER.seal(TENANT, [SEARCHED, FOUND])}),
            QUESTION,
        ],
        [UserMessage("Hi"), SEARCHED, FOUND, UserMessage("Hi")],
    ),
    "a result in an assistant message": (
        [QUESTION, assistant(USE, result("toolu_1", content="seen")), QUESTION],
        [UserMessage("Hi"), CALL, ToolResult("call_1", "look", "seen"), UserMessage("Hi")],
    ),
    "a foreign result without its call": (
        [QUESTION, assistant(WEB[1]), QUESTION],
        [UserMessage("Hi"), ToolResult("call_s", "web_search", "T\nhttps://t.example"), UserMessage("Hi")],
    ),
    "a fetched PDF": (
        [QUESTION, assistant({**WEB[1], "content": FETCHED_PDF}), QUESTION],
        [
            UserMessage("Hi"),
            ToolResult("call_s", "web_search", f"https://t.example\nPaper\n{LINE.format(kind='File')}"),
            UserMessage("Hi"),
        ],
    ),
    "an edit and a file of another server": (
        [QUESTION, assistant({**WEB[1], "content": {"lines": ["-a", "+b"], "content": [{"file_id": "f"}]}}), QUESTION],
        [UserMessage("Hi"), ToolResult("call_s", "web_search", "-a\n+b\nf"), UserMessage("Hi")],
    ),
    "the state of a browser": (
        [QUESTION, assistant(USE), user(result("toolu_1", content=[{"type": "browser_state", "tabs": [TAB]}]))],
        [UserMessage("Hi"), CALL, ToolResult("call_1", "look", '{"tabs":[{"title":"T"}],"state_changes":null}')],
    ),
    "a tool that is defined, removed and allowed again": (
        [
            user({"type": "tool_addition", "tool": {"type": "tool_definition", "definition": LOOK}}),
            {"role": "system", "content": [text("Be brief."), removal("look")]},
            {"role": "system", "content": [addition("look")]},
            QUESTION,
        ],
        [
            AddedTools((FunctionTool("look", "Looks.", {"type": "object"}),)),
            DeveloperMessage("Be brief."),
            DeveloperMessage("From now on, do not call this tool: look"),
            DeveloperMessage("You can call this tool again: look"),
            UserMessage("Hi"),
        ],
    ),
    "a removal among results": (
        [QUESTION, assistant(USE, removal("look")), user(result("toolu_1"), text("And?"))],
        [
            UserMessage("Hi"),
            CALL,
            ToolResult("call_1", "look", ""),
            DeveloperMessage("From now on, do not call this tool: look"),
            UserMessage("And?"),
        ],
    ),
    "a summary of another server with changes of tools": (
        [
            QUESTION,
            assistant({"type": "compaction", "content": "We met.", "tool_changes": [removal("look")]}),
            QUESTION,
        ],
        [
            UserMessage(SUMMARY_HEADING + "We met."),
            DeveloperMessage("From now on, do not call this tool: look"),
            UserMessage("Hi"),
        ],
    ),
    "instructions in the middle": (
        [QUESTION, {"role": "system", "content": "Be brief."}, QUESTION],
        [UserMessage("Hi"), DeveloperMessage("Be brief."), UserMessage("Hi")],
    ),
}


@pytest.mark.parametrize(("messages", "items"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_messages_become_conversation_items(messages: list[Json], items: list[Item]) -> None:
    assert items_of(*messages) == tuple(items)


def summary(*changes: Json) -> Json:
    return {"type": "compaction", "content": "We met.", "tool_changes": [*changes]}


def system(*blocks: Json) -> Json:
    return {"role": "system", "content": [*blocks]}


DEFINITION: Json = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": LOOK}}
# Messages with a compaction, and the tools that the model must not call after them.
REMOVALS: dict[str, tuple[list[Json], set[str]]] = {
    "removed before it": ([QUESTION, system(removal("look")), assistant(summary(), text("Yes.")), QUESTION], {"look"}),
    "removed at the start": ([system(removal("look")), QUESTION, assistant(summary()), QUESTION], {"look"}),
    "removed in its message": ([QUESTION, assistant(removal("look"), summary(), text("Yes.")), QUESTION], {"look"}),
    "removed by it": ([assistant(summary(removal("look"))), QUESTION], {"look"}),
    "removed by an earlier one": (
        [assistant(summary(removal("look"))), QUESTION, assistant(summary()), QUESTION],
        {"look"},
    ),
    "added again before it": (
        [QUESTION, system(removal("look"), addition("look")), assistant(summary()), QUESTION],
        set(),
    ),
    "defined again before it": ([QUESTION, system(removal("look"), DEFINITION), assistant(summary()), QUESTION], set()),
    "added again after it": (
        [QUESTION, system(removal("look")), assistant(summary()), QUESTION, system(addition("look"))],
        set(),
    ),
}


@pytest.mark.parametrize(("messages", "removed"), REMOVALS.values(), ids=REMOVALS)
def test_a_removed_tool_stays_removed_after_a_compaction(messages: list[Json], removed: set[str]) -> None:
    assert generation_of(messages=messages).request.conversation.removed == removed


SYSTEM_PROMPTS: dict[str, tuple[Json, str]] = {
    "none": ({}, ""),
    "a string": ({"system": "Be brief."}, "Be brief."),
    "blocks": ({"system": [text("Be brief."), text("Be kind.")]}, "Be brief.\n\nBe kind."),
    "a billing header": (
        {"system": [text("x-anthropic-billing-header: cc_version=2; cch=1f;"), text("Be brief.")]},
        "Be brief.",
    ),
    "a billing header alone": ({"system": "x-anthropic-billing-header: cc_version=2; cch=1f;"}, ""),
    "a billing header before other lines": (
        {"system": "x-anthropic-billing-header: cc_version=2; cch=1f;\n\nBe brief.\nBe kind."},
        "Be brief.\nBe kind.",
    ),
    "the text of a billing header in another line": (
        {"system": "Be brief.\nx-anthropic-billing-header: x"},
        "Be brief.\nx-anthropic-billing-header: x",
    ),
    "leading messages": ({"system": "A.", "messages": [{"role": "system", "content": "B."}, QUESTION]}, "A.\n\nB."),
}


@pytest.mark.parametrize(("fields", "instructions"), SYSTEM_PROMPTS.values(), ids=SYSTEM_PROMPTS)
def test_the_system_prompt_becomes_the_instructions(fields: Json, instructions: str) -> None:
    assert generation_of(**fields).request.conversation.preamble.instructions == instructions


PREFILLS: dict[str, tuple[Json, str | None]] = {
    "text": (assistant(text("The answer is (")), "The answer is ("),
    "text after thinking": (assistant(thinking(), text("The")), "The"),
    "a call": (assistant(USE), None),
    "only thinking": (assistant(thinking()), None),
    "an unfinished search": (assistant(text("I look."), *WEB), None),
}


@pytest.mark.parametrize(("last", "prefill"), PREFILLS.values(), ids=PREFILLS)
def test_a_trailing_assistant_text_becomes_the_prefill(last: Json, prefill: str | None) -> None:
    assert generation_of(messages=[QUESTION, last]).request.conversation.prefill == prefill


def test_request_fields_reach_the_engine() -> None:
    generation = generation_of(
        tools=[{**LOOK, "strict": None}, {"type": "custom", "name": "go", "input_schema": {"type": "object"}}],
        tool_choice={"type": "tool", "name": "go", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        temperature=0.5,
        top_k=7,
        output_config={"effort": "max"},
        stream=True,
    )
    request = generation.request
    assert request.conversation.preamble.tools == (
        FunctionTool("look", "Looks.", {"type": "object"}),
        FunctionTool("go", "", {"type": "object"}),
    )
    assert (request.answer.choice, request.answer.parallel_calls, request.answer.calls_allowed) == (
        ForcedCalls(frozenset({"go"})),
        False,
        True,
    )
    assert (request.answer.max_tokens, request.answer.stop, request.origin.surface, request.answer.whole) == (
        100,
        ("END",),
        "messages",
        False,
    )
    assert (request.answer.sampling.temperature, request.answer.sampling.top_k) == (0.5, 7)
    assert request.conversation.preamble.effort is Effort.HIGH
    assert (generation.stream, generation.thinking, generation.notes) == (True, Thinking.HIDDEN, ())


THINKING_FIELDS: dict[str, tuple[Json, bool, tuple[Thinking, Effort, int | None]]] = {
    "not requested": ({}, True, (Thinking.HIDDEN, Effort.MEDIUM, 50)),
    "a budget": ({"type": "enabled", "budget_tokens": 20}, True, (Thinking.SHOWN, Effort.MEDIUM, 20)),
    "a budget above the operator's": (
        {"type": "enabled", "budget_tokens": 99},
        True,
        (Thinking.SHOWN, Effort.MEDIUM, 50),
    ),
    "adaptive": ({"type": "adaptive", "display": "summarized"}, True, (Thinking.SHOWN, Effort.MEDIUM, 50)),
    "omitted": ({"type": "adaptive", "display": "omitted"}, True, (Thinking.OMITTED, Effort.MEDIUM, 50)),
    "hidden by the operator": ({"type": "adaptive"}, False, (Thinking.OMITTED, Effort.MEDIUM, 50)),
    "disabled": ({"type": "disabled"}, True, (Thinking.HIDDEN, Effort.LOW, 50)),
}


@pytest.mark.parametrize(
    ("thinking_field", "show_reasoning", "expected"), THINKING_FIELDS.values(), ids=THINKING_FIELDS
)
def test_the_thinking_field_sets_display_effort_and_budget(
    thinking_field: Json, show_reasoning: bool, expected: tuple[Thinking, Effort, int | None]
) -> None:
    model = MessagesModel("gpt-oss", show_reasoning=show_reasoning, rules=ModelRules(reasoning_budget=50))
    generation = generation_of(model, **({"thinking": thinking_field} if thinking_field else {}))
    assert (
        generation.thinking,
        generation.request.conversation.preamble.effort,
        generation.request.answer.reasoning_budget,
    ) == expected


@pytest.mark.parametrize("field", ["output_config.format", "output_format"])
def test_an_output_schema_is_enforced_in_both_spellings(field: str) -> None:
    response_format = {"type": "json_schema", "schema": {"type": "object", "required": ["a"]}}
    request = generation_of(
        **({"output_config": {"format": response_format}} if "." in field else {field: response_format})
    ).request
    assert request.answer.form is not None
    assert request.answer.form.schema == response_format["schema"]
    assert request.answer.calls_allowed is False


def test_server_tools_use_the_tool_servers_of_the_operator() -> None:
    model = MessagesModel("gpt-oss", trained=BROWSER)
    generation = generation_of(model, tools=[LOOK, SEARCH], tool_choice={"type": "tool", "name": "web_search"})
    assert generation.server_tool_names == {"browser"}
    assert generation.request.server_tools is not None
    assert [server.label for server in generation.request.server_tools.servers] == ["builtin:browser"]
    assert generation.request.server_tools.max_calls == 2
    assert generation.request.answer.choice == ForcedCalls(frozenset(), frozenset({("builtin:browser", None)}))
    assert [tool.name for tool in generation.request.conversation.preamble.tools] == ["look"]
    assert generation.notes == ("tools.1.allowed_domains: no effect",)
    without_calls = generation_of(model, tools=[LOOK, SEARCH], tool_choice={"type": "none"}).request
    assert (without_calls.server_tools, without_calls.answer.calls_allowed) == (None, False)


def test_a_response_pauses_only_if_the_client_sees_every_server_tool() -> None:
    docs = ToolServer("docs", "https://docs.example", approval=Approval(otherwise=False))
    model = MessagesModel("gpt-oss", trained=BROWSER, runnable=RunnableTools((docs,)), pause_after=3)
    for fields, pause_after in (({}, 3), ({"unisono": {"run_tools": True}}, None)):
        hosting = generation_of(model, tools=[SEARCH], **fields).request.server_tools
        assert hosting is not None
        assert (hosting.visible, hosting.pause_after) == ({"builtin:browser"}, pause_after)


def test_a_continued_response_drops_the_forced_call_and_keeps_its_session() -> None:
    model = MessagesModel("gpt-oss", trained=BROWSER)
    use = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
    items = [AssistantCall("call_1", "browser.search", '{"query":"x"}'), ToolResult("call_1", "browser.search", "y")]
    foreign = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{SEALED: "EqQBCg"}]}
    ours = {**foreign, "content": [{SEALED: SEALER.seal(TENANT, items, "a talk")}]}
    force: Json = {"tools": [SEARCH], "tool_choice": {"type": "any"}}
    paused = generation_of(model, messages=[QUESTION, assistant(use, ours), assistant(use, foreign)], **force)
    assert paused.request.answer.choice is None
    assert paused.session == "a talk"
    next_turn = generation_of(model, messages=[QUESTION, assistant(use, ours), QUESTION], **force)
    assert next_turn.request.answer.choice == ForcedCalls()
    assert generation_of(model, **force).session == f"{TENANT}\0req_1"
    of_another_tenant = {**foreign, "content": [{SEALED: SEALER.seal("others", items, "their talk")}]}
    assert (
        generation_of(model, messages=[QUESTION, assistant(use, of_another_tenant)], **force).session
        == f"{TENANT}\0req_1"
    )


# case: (name of the server and of its tool, name that the prompt declares)
UNSEALED_CALLS = {
    "usual names": ("docs", "echo", "docs__echo"),
    "the name of a client's tool": ("docs", "look", next(iter(ToolNames([("docs", "look")], ["docs__look"])))),
    "a long name": ("docs", "x" * 64, next(iter(ToolNames([("docs", "x" * 64)])))),
    "no server": (None, "echo", "echo"),
}


@pytest.mark.parametrize(("server", "tool", "name"), UNSEALED_CALLS.values(), ids=UNSEALED_CALLS)
def test_unsealed_call_of_an_mcp_server_has_the_declared_name(server: str | None, tool: str, name: str) -> None:
    use = {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": tool, "server_name": server, "input": {}}
    result = {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": False, "content": [text("x")]}
    own = {"name": "docs__look", "input_schema": {"type": "object"}}
    made = generation_of(messages=[QUESTION, assistant(use, result), QUESTION], tools=[own])
    items = made.request.conversation.items
    assert [item.name for item in items if isinstance(item, AssistantCall | ToolResult)] == [name, name]


def test_unavailable_tools_are_skipped_with_a_note() -> None:
    generation = generation_of(tools=[LOOK, SEARCH, {"type": "computer_20250124", "name": "computer"}])
    assert [tool.name for tool in generation.request.conversation.preamble.tools] == ["look"]
    assert [note.partition(":")[0] for note in generation.notes] == ["tools.1.type", "tools.2.type"]
    assert "unisono.builtin_tools.browser" in generation.notes[0]


def test_the_operators_tools_run_only_on_request() -> None:
    docs = ToolServer("docs", "https://docs.example", approval=Approval(otherwise=False))
    model = MessagesModel("gpt-oss", runnable=RunnableTools((docs,)))
    assert generation_of(model).request.server_tools is None
    hosting = generation_of(model, unisono={"run_tools": True}).request.server_tools
    assert hosting is not None
    assert [(server.label, server.owner) for server in hosting.servers] == [("docs", TENANT)]
    note = "unisono.run_tools: no effect, because there are no tools to run, or because of 'tool_choice'"
    assert generation_of(unisono={"run_tools": True}).notes == (note,)


def test_fields_without_effect_are_noted_except_caching() -> None:
    generation = generation_of(
        service_tier="auto", container=None, betas=["x"], cache_control={"type": "ephemeral"}, metadata={}
    )
    assert generation.notes == ("service_tier: no effect", "betas: no effect")


UNREAD: dict[str, tuple[Json, str]] = {
    "forged thinking": (assistant({**thinking(), "thinking": "Let me see about something else."}), "content.0"),
    "unsigned thinking": (assistant({"type": "thinking", "thinking": "Hm.", "signature": ""}), "content.0"),
    "thinking of another tenant": (
        assistant({**thinking(), "signature": SEALER.sign("others", REASONING_TEXT)}),
        "content.0",
    ),
    "omitted thinking of another server": (assistant({**OMITTED, "signature": "EqQBCg"}), "content.0"),
    "redacted thinking of another server": (
        assistant({"type": "redacted_thinking", "data": "EqQBCg"}),
        "content.0",
    ),
    "a call in a user message": (user(text("Hi"), USE), "content.1"),
    "thinking in a user message": (user(text("Hi"), thinking()), "content.1"),
    "a compaction that failed": (user(text("Hi"), {"type": "compaction", "content": None}), "content.1"),
    "a change of tools in a result": (
        assistant(USE, result("toolu_1", content=[removal("look")])),
        "content.1.content.0",
    ),
    "an unknown tool": (user(text("Hi"), addition("look")), "content.1"),
    "an invalid definition": (
        user(text("Hi"), {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "a b"}}}),
        "content.1",
    ),
    "an unavailable definition": (
        user(text("Hi"), {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": SEARCH}}),
        "content.1",
    ),
    "a summary of another server with an unknown tool": (
        assistant({"type": "compaction", "content": "We met.", "tool_changes": [addition("look")]}),
        "content.0.tool_changes.0",
    ),
    "advice that is encrypted": (
        assistant({**WEB[1], "type": "advisor_tool_result", "content": {SEALED: "EqQBCg"}}),
        "content.0",
    ),
    "instructions with settings alone": ({"role": "system", "output_config": {"effort": "low"}}, "output_config"),
}


@pytest.mark.parametrize(("message", "at"), UNREAD.values(), ids=UNREAD)
def test_what_the_model_cannot_read_in_the_history_is_noted(message: Json, at: str) -> None:
    generation = generation_of(messages=[QUESTION, message, QUESTION])
    assert [note.partition(":")[0] for note in generation.notes] == [f"messages.1.{at}"]
    items = generation.request.conversation.items
    assert not any(isinstance(item, AssistantReasoning | AddedTools | DeveloperMessage) for item in items)


def test_settings_alone_do_not_change_the_system_prompt() -> None:
    settings = {"role": "system", "output_config": {"effort": "low"}}
    generation = generation_of(messages=[settings, QUESTION])
    assert generation.request.conversation == generation_of().request.conversation
    assert generation.notes == ("messages.0.output_config: no effect",)


def test_a_tool_that_a_message_defines_can_be_required() -> None:
    defined = user({"type": "tool_addition", "tool": {"type": "tool_definition", "definition": LOOK}})
    generation = generation_of(messages=[defined, QUESTION], tool_choice={"type": "tool", "name": "look"})
    assert isinstance(generation.request.answer.choice, ForcedCalls)


def test_a_top_p_of_0_is_accepted() -> None:
    assert generation_of(top_p=0).request.answer.sampling.top_p == 0


def test_a_strict_tool_may_have_optional_properties_and_all_formats_of_anthropic() -> None:
    schema = {
        "type": "object",
        "properties": {"place": {"type": "string"}, "source": {"allOf": [{"type": "string", "format": "uri"}]}},
        "required": ["place"],
        "additionalProperties": False,
    }
    generation = generation_of(tools=[{**LOOK, "input_schema": schema, "strict": True}])
    assert generation.request.conversation.preamble.tools == (FunctionTool("look", "Looks.", schema, strict=True),)
    assert not generation.notes


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}
REFUSED: dict[str, tuple[Json, str]] = {
    "an image": ({"messages": [user(IMAGE)]}, "messages.0.content.0.type"),
    "a binary document": ({"messages": [user(PDF)]}, "messages.0.content.0.source.type"),
    "an unknown block": ({"messages": [user({"type": "smell"})]}, "messages.0.content.0.type"),
    "a container upload": ({"messages": [user({"type": "container_upload"})]}, "messages.0.content.0.type"),
    "an empty tool name": ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": ""}}, "tool_choice.name"),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0"),
    "a result of another call": (
        {"messages": [QUESTION, assistant(USE), user(result("toolu_9"))]},
        "messages.2.content.0.tool_use_id",
    ),
    "arguments as text": ({"messages": [QUESTION, assistant({**USE, "input": "{}"})]}, "messages.1.content.0.input"),
    "no input schema": ({"tools": [{"name": "look"}]}, "tools.0.input_schema"),
    "no tool name": ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
    "an open schema of a strict tool": (
        {"tools": [{**LOOK, "input_schema": {"type": "object", "properties": {"a": {}}}, "strict": True}]},
        "tools.0.input_schema",
    ),
    "two tools with one name": ({"tools": [LOOK, LOOK]}, "tools.1.name"),
    "an undeclared tool": ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    "a forced server tool that is unavailable": (
        {"tools": [LOOK, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
        "tool_choice",
    ),
    "a forced call without tools": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "only unavailable tools": ({"tools": [SEARCH]}, "tools.0.type"),
    "a forced tool without a name": ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "no answer, but a stream": ({"max_tokens": 0, "stream": True}, "stream"),
    "no answer, but thinking": ({"max_tokens": 0, "thinking": {"type": "adaptive"}}, "thinking"),
    "no answer, but a forced call": ({"max_tokens": 0, "tools": [LOOK], "tool_choice": {"type": "any"}}, "tool_choice"),
    "no answer, but a format": (
        {"max_tokens": 0, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "output_config.format",
    ),
    "a negative number of tokens": ({"max_tokens": -1}, "max_tokens"),
    "a thread": ({"thread": {"type": "create"}}, "thread"),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
def test_an_invalid_field_is_refused_with_its_path(fields: Json, param: str) -> None:
    with pytest.raises((UnisonoError, ValidationError)) as caught:
        generation_of(**fields)
    failure = failure_of(caught.value)
    assert failure.status == 400
    assert (failure.param or "").startswith(param)
