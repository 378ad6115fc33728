"""What Messages requests mean: the conversation, the tools, and everything that is asked of the engine."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.api.messages.mounted import SEALER
from unisono.api.error_responses import failure_of
from unisono.api.gateway_tools import RunnableTools
from unisono.api.messages.inbound import MessagesGeneration, MessagesModel, Thinking, needs_seals, to_generation_request
from unisono.api.messages.schema import MessagesRequest
from unisono.api.messages.server_tool_blocks import SEALED
from unisono.api.model_rules import ModelRules
from unisono.core.access import Caller
from unisono.core.conversation import (
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
from unisono.core.tools import Approval, ToolServer
from unisono.engine.request import ForcedCalls
from unisono.errors import UnisonoError

Json = dict[str, Any]
TENANT = "team"
MODEL = MessagesModel("gpt-oss")
ASK: Json = {"role": "user", "content": "Hi"}
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2, "allowed_domains": ["a.example"]}
BROWSER = {"browser": ToolServer("pages", "https://pages.example", approval=Approval(otherwise=False))}
THOUGHT = "Let me see."
USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "it"}}
CALL = AssistantCall("call_1", "look", '{"at":"it"}')


def understood(model: MessagesModel = MODEL, **fields: Any) -> MessagesGeneration:
    request = MessagesRequest.model_validate({"model": "m", "max_tokens": 100, "messages": [ASK], **fields})
    return to_generation_request(
        request,
        model=model,
        today="2026-11-20",
        caller=Caller(TENANT),
        request_id="req_1",
        seals=SEALER if needs_seals(request) else None,
    )


def said(*messages: Json) -> tuple[Item, ...]:
    return understood(messages=list(messages)).request.conversation.items


def assistant(*blocks: Any) -> Json:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: Any) -> Json:
    return {"role": "user", "content": list(blocks)}


def text(words: str, **more: Any) -> Json:
    return {"type": "text", "text": words, **more}


def result(call_id: str, **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": call_id, **more}


def thinking(words: str = THOUGHT) -> Json:
    return {"type": "thinking", "thinking": words, "signature": SEALER.sign(TENANT, words)}


OMITTED = {"type": "thinking", "thinking": "", "signature": SEALER.seal(TENANT, [AssistantReasoning(THOUGHT, (1, 2))])}
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
OUR_WEB = [WEB[0], {**WEB[1], "content": [{**WEB[1]["content"][0], SEALED: SEALER.seal(TENANT, [SEARCHED, FOUND])}]}]

TALKS: dict[str, tuple[list[Json], list[Item]]] = {
    "a string": ([ASK], [UserMessage("Hi")]),
    "texts": ([user(text("One"), text("Two", cache_control={"type": "ephemeral"}))], [UserMessage("One\n\nTwo")]),
    "nothing": ([user(), ASK], [UserMessage(""), UserMessage("Hi")]),
    "an answer": (
        [ASK, {"role": "assistant", "content": "Hello."}, ASK],
        [UserMessage("Hi"), AssistantMessage("Hello."), UserMessage("Hi")],
    ),
    "a preamble and an answer": (
        [ASK, assistant(text("I look."), text("It is so.")), ASK],
        [
            UserMessage("Hi"),
            AssistantMessage("I look.", Phase.COMMENTARY),
            AssistantMessage("It is so."),
            UserMessage("Hi"),
        ],
    ),
    "what other servers say beside": (
        [
            ASK,
            assistant({"type": "compaction", "content": "We met."}, {"type": "fallback"}, text("It is so.")),
            ASK,
            assistant({"type": "compaction", "content": None}, {"type": "mcp_tool_listing"}),
            ASK,
        ],
        [
            UserMessage("Hi"),
            AssistantMessage("We met.", Phase.COMMENTARY),
            AssistantMessage("It is so."),
            UserMessage("Hi"),
            UserMessage("Hi"),
        ],
    ),
    "a result of ours whose call a client left out": (
        [ASK, assistant(text("I look."), OUR_WEB[1], text("It is so.")), ASK],
        [
            UserMessage("Hi"),
            AssistantMessage("I look.", Phase.COMMENTARY),
            SEARCHED,
            FOUND,
            AssistantMessage("It is so."),
            UserMessage("Hi"),
        ],
    ),
    "an answer in pieces that cite": (
        [ASK, assistant(text("It is ", citations=None), text("so.", citations=[{"type": "char_location"}])), ASK],
        [UserMessage("Hi"), AssistantMessage("It is so."), UserMessage("Hi")],
    ),
    "thoughts, a call and its result": (
        [ASK, assistant(thinking(), text("I look."), USE), user(result("toolu_1", content="seen"))],
        [
            UserMessage("Hi"),
            AssistantReasoning(THOUGHT),
            AssistantMessage("I look.", Phase.COMMENTARY),
            CALL,
            ToolResult("call_1", "look", "seen"),
        ],
    ),
    "thoughts that were not shown": (
        [ASK, assistant(OMITTED, USE), user(result("toolu_1"))],
        [UserMessage("Hi"), AssistantReasoning(THOUGHT, (1, 2)), CALL, ToolResult("call_1", "look", "")],
    ),
    "thoughts as data": (
        [ASK, assistant(REDACTED, USE), user(result("toolu_1"))],
        [UserMessage("Hi"), AssistantReasoning(THOUGHT, (1, 2)), CALL, ToolResult("call_1", "look", "")],
    ),
    "results in any order, then text": (
        [
            ASK,
            assistant(USE, thinking(), {**USE, "id": "toolu_2"}),
            user(text("And?"), result("toolu_2", content=[text("b"), text("c")]), result("toolu_1", content="a")),
        ],
        [
            UserMessage("Hi"),
            CALL,
            ToolResult("call_1", "look", "a"),
            AssistantReasoning(THOUGHT),
            AssistantCall("call_2", "look", '{"at":"it"}'),
            ToolResult("call_2", "look", "b\n\nc"),
            UserMessage("And?"),
        ],
    ),
    "results that failed": (
        [
            ASK,
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
    "ids of other makers": (
        [ASK, assistant({**USE, "id": "x-1"}), user(result("x-1", content="seen"))],
        [UserMessage("Hi"), AssistantCall("x-1", "look", '{"at":"it"}'), ToolResult("x-1", "look", "seen")],
    ),
    "arguments that were no object": (
        [ASK, assistant({**USE, "input": {"unparsed_arguments": '{"at'}}), user(result("toolu_1"))],
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
        [UserMessage("D\nIt\n\nthat\n\nS\nhttps://s.example\nfound")],
    ),
    "a search by another server": (
        [ASK, assistant(text("I look."), *WEB, text("It is so.")), ASK],
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
        [ASK, assistant(*OUR_WEB, text("It is so.")), ASK],
        [UserMessage("Hi"), SEARCHED, FOUND, AssistantMessage("It is so."), UserMessage("Hi")],
    ),
    "instructions in the middle": (
        [ASK, {"role": "system", "content": "Be brief."}, ASK],
        [UserMessage("Hi"), DeveloperMessage("Be brief."), UserMessage("Hi")],
    ),
}


@pytest.mark.parametrize(("messages", "items"), TALKS.values(), ids=TALKS)
def test_messages_are_read_as_what_was_said(messages: list[Json], items: list[Item]) -> None:
    assert said(*messages) == tuple(items)


SYSTEMS: dict[str, tuple[Json, str]] = {
    "none": ({}, ""),
    "a string": ({"system": "Be brief."}, "Be brief."),
    "blocks": ({"system": [text("Be brief."), text("Be kind.")]}, "Be brief.\n\nBe kind."),
    "what is billed": (
        {"system": [text("x-anthropic-billing-header: cc_version=2; cch=1f;"), text("Be brief.")]},
        "Be brief.",
    ),
    "leading messages": ({"system": "A.", "messages": [{"role": "system", "content": "B."}, ASK]}, "A.\n\nB."),
}


@pytest.mark.parametrize(("fields", "instructions"), SYSTEMS.values(), ids=SYSTEMS)
def test_instructions_stand_before_the_talk(fields: Json, instructions: str) -> None:
    assert understood(**fields).request.conversation.preamble.instructions == instructions


PREFILLS: dict[str, tuple[Json, str | None]] = {
    "text": (assistant(text("The answer is (")), "The answer is ("),
    "text behind thoughts": (assistant(thinking(), text("The")), "The"),
    "a call": (assistant(USE), None),
    "nothing but thoughts": (assistant(thinking()), None),
    "a search that is not over": (assistant(text("I look."), *WEB), None),
}


@pytest.mark.parametrize(("last", "prefill"), PREFILLS.values(), ids=PREFILLS)
def test_the_beginning_of_the_answer_may_be_given(last: Json, prefill: str | None) -> None:
    assert understood(messages=[ASK, last]).request.conversation.prefill == prefill


def test_what_is_asked_reaches_the_engine() -> None:
    asked = understood(
        tools=[{**LOOK, "strict": None}, {"type": "custom", "name": "go", "input_schema": {"type": "object"}}],
        tool_choice={"type": "tool", "name": "go", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        temperature=0.5,
        top_k=7,
        output_config={"effort": "max"},
        stream=True,
    )
    turn = asked.request
    assert turn.conversation.preamble.tools == (
        FunctionTool("look", "Looks.", {"type": "object"}),
        FunctionTool("go", "", {"type": "object"}),
    )
    assert (turn.choice, turn.parallel_calls, turn.calls_allowed) == (ForcedCalls(frozenset({"go"})), False, True)
    assert (turn.max_tokens, turn.stop, turn.surface, turn.whole) == (100, ("END",), "messages", False)
    assert (turn.sampling.temperature, turn.sampling.top_k) == (0.5, 7)
    assert turn.conversation.preamble.effort is Effort.HIGH
    assert (asked.stream, asked.thinking, asked.notes) == (True, Thinking.HIDDEN, ())


THOUGHTS: dict[str, tuple[Json, bool, tuple[Thinking, Effort, int | None]]] = {
    "not asked for": ({}, True, (Thinking.HIDDEN, Effort.MEDIUM, 50)),
    "a budget": ({"type": "enabled", "budget_tokens": 20}, True, (Thinking.SHOWN, Effort.MEDIUM, 20)),
    "a budget over the operator's": (
        {"type": "enabled", "budget_tokens": 99},
        True,
        (Thinking.SHOWN, Effort.MEDIUM, 50),
    ),
    "adaptive": ({"type": "adaptive", "display": "summarized"}, True, (Thinking.SHOWN, Effort.MEDIUM, 50)),
    "omitted": ({"type": "adaptive", "display": "omitted"}, True, (Thinking.OMITTED, Effort.MEDIUM, 50)),
    "hidden by the operator": ({"type": "adaptive"}, False, (Thinking.OMITTED, Effort.MEDIUM, 50)),
    "disabled": ({"type": "disabled"}, True, (Thinking.HIDDEN, Effort.LOW, 50)),
}


@pytest.mark.parametrize(("asked", "shows", "expected"), THOUGHTS.values(), ids=THOUGHTS)
def test_thoughts_are_bounded_and_shown_as_asked(
    asked: Json, shows: bool, expected: tuple[Thinking, Effort, int | None]
) -> None:
    model = MessagesModel("gpt-oss", show_reasoning=shows, rules=ModelRules(reasoning_budget=50))
    made = understood(model, **({"thinking": asked} if asked else {}))
    assert (made.thinking, made.request.conversation.preamble.effort, made.request.reasoning_budget) == expected


@pytest.mark.parametrize("at", ["output_config.format", "output_format"])
def test_an_answer_may_have_to_be_of_a_schema(at: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "required": ["a"]}}
    turn = understood(**({"output_config": {"format": form}} if "." in at else {at: form})).request
    assert turn.form is not None
    assert turn.form.schema == form["schema"]
    assert turn.calls_allowed is False


def test_server_tools_are_the_gateways_own_where_the_operator_has_them() -> None:
    served = MessagesModel("gpt-oss", trained=BROWSER)
    made = understood(served, tools=[LOOK, SEARCH], tool_choice={"type": "tool", "name": "web_search"})
    assert made.server_tool_names == {"browser"}
    assert made.request.hosting is not None
    assert [server.label for server in made.request.hosting.servers] == ["builtin:browser"]
    assert made.request.hosting.max_calls == 2
    assert made.request.choice == ForcedCalls(frozenset(), frozenset({("builtin:browser", None)}))
    assert [tool.name for tool in made.request.conversation.preamble.tools] == ["look"]
    assert made.notes == ("tools.1.allowed_domains: no effect",)
    none = understood(served, tools=[LOOK, SEARCH], tool_choice={"type": "none"}).request
    assert (none.hosting, none.calls_allowed) == (None, False)


def test_an_answer_pauses_where_its_client_sees_all_that_was_run() -> None:
    docs = ToolServer("docs", "https://docs.example", approval=Approval(otherwise=False))
    model = MessagesModel("gpt-oss", trained=BROWSER, runnable=RunnableTools((docs,)), pause_after=3)
    for fields, bound in (({}, 3), ({"unisono": {"run_tools": True}}, None)):
        hosting = understood(model, tools=[SEARCH], **fields).request.hosting
        assert hosting is not None
        assert (hosting.shown, hosting.pause_after) == ({"builtin:browser"}, bound)


def test_an_answer_that_goes_on_has_made_the_forced_call_and_talks_to_the_same_server() -> None:
    served = MessagesModel("gpt-oss", trained=BROWSER)
    use = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
    items = [AssistantCall("call_1", "browser.search", '{"query":"x"}'), ToolResult("call_1", "browser.search", "y")]
    foreign = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{SEALED: "EqQBCg"}]}
    ours = {**foreign, "content": [{SEALED: SEALER.seal(TENANT, items, "a talk")}]}
    force: Json = {"tools": [SEARCH], "tool_choice": {"type": "any"}}
    paused = understood(served, messages=[ASK, assistant(use, ours), assistant(use, foreign)], **force)
    assert paused.request.choice is None
    assert paused.session == "a talk"
    over = understood(served, messages=[ASK, assistant(use, ours), ASK], **force)
    assert over.request.choice == ForcedCalls()
    assert understood(served, **force).session == f"{TENANT}\0req_1"
    others = {**foreign, "content": [{SEALED: SEALER.seal("others", items, "their talk")}]}
    assert understood(served, messages=[ASK, assistant(use, others)], **force).session == f"{TENANT}\0req_1"


def test_tools_that_are_not_there_are_left_out_beside_others() -> None:
    made = understood(tools=[LOOK, SEARCH, {"type": "bash_20250124", "name": "bash"}])
    assert [tool.name for tool in made.request.conversation.preamble.tools] == ["look"]
    assert [note.partition(":")[0] for note in made.notes] == ["tools.1.type", "tools.2.type"]
    assert "unisono.builtin_tools.browser" in made.notes[0]


def test_the_operators_tools_are_run_where_the_client_says_so() -> None:
    docs = ToolServer("docs", "https://docs.example", approval=Approval(otherwise=False))
    model = MessagesModel("gpt-oss", runnable=RunnableTools((docs,)))
    assert understood(model).request.hosting is None
    hosting = understood(model, unisono={"run_tools": True}).request.hosting
    assert hosting is not None
    assert [(server.label, server.owner) for server in hosting.servers] == [("docs", TENANT)]
    note = "unisono.run_tools: no effect, because there are no tools to run, or because of 'tool_choice'"
    assert understood(unisono={"run_tools": True}).notes == (note,)


def test_fields_without_effect_are_noted_and_those_of_caching_are_not() -> None:
    made = understood(
        service_tier="auto", container=None, betas=["x"], cache_control={"type": "ephemeral"}, metadata={}
    )
    assert made.notes == ("service_tier: no effect", "betas: no effect")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}
FORGED = {**thinking(), "thinking": "Let me see about something else."}
REFUSED: dict[str, tuple[Json, str]] = {
    "an image": ({"messages": [user(IMAGE)]}, "messages.0.content.0.type"),
    "an image in a result": (
        {"messages": [ASK, assistant(USE), user(result("toolu_1", content=[IMAGE]))]},
        "messages.2.content.0.content.0.type",
    ),
    "a document of bytes": ({"messages": [user(PDF)]}, "messages.0.content.0.source.type"),
    "a block nobody knows": ({"messages": [user({"type": "smell"})]}, "messages.0.content.0.type"),
    "a call of the user's": ({"messages": [user(USE)]}, "messages.0.content.0.type"),
    "a result of the assistant's": (
        {"messages": [ASK, assistant(USE, result("toolu_1"))]},
        "messages.1.content.1.type",
    ),
    "a container's file": ({"messages": [user({"type": "container_upload"})]}, "messages.0.content.0.type"),
    "no name of a tool": ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": ""}}, "tool_choice.name"),
    "a result of another server's without its call": (
        {"messages": [ASK, assistant(WEB[1]), ASK]},
        "messages.1.content.0.tool_use_id",
    ),
    "a result of nothing": ({"messages": [user(result("toolu_9"))]}, "messages.0.content.0.tool_use_id"),
    "forged thoughts": ({"messages": [ASK, assistant(FORGED)]}, "messages.1.content.0.signature"),
    "unsigned thoughts": (
        {"messages": [ASK, assistant({"type": "thinking", "thinking": "Hm.", "signature": ""})]},
        "messages.1.content.0.signature",
    ),
    "thoughts of another tenant": (
        {"messages": [ASK, assistant({**thinking(), "signature": SEALER.sign("others", THOUGHT)})]},
        "messages.1.content.0.signature",
    ),
    "omitted thoughts of others": (
        {"messages": [ASK, assistant({**OMITTED, "signature": "EqQBCg"})]},
        "messages.1.content.0.signature",
    ),
    "data of others": (
        {"messages": [ASK, assistant({"type": "redacted_thinking", "data": "EqQBCg"})]},
        "messages.1.content.0.data",
    ),
    "arguments that are text": ({"messages": [ASK, assistant({**USE, "input": "{}"})]}, "messages.1.content.0.input"),
    "no schema": ({"tools": [{"name": "look"}]}, "tools.0.input_schema"),
    "no name": ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
    "a schema that cannot be kept": (
        {"tools": [{**LOOK, "input_schema": {"type": "object", "properties": {"a": {}}}, "strict": True}]},
        "tools.0.input_schema",
    ),
    "two tools of a name": ({"tools": [LOOK, LOOK]}, "tools.1.name"),
    "a tool that is not there": ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    "a forced server tool that is not there": (
        {"tools": [LOOK, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
        "tool_choice",
    ),
    "nothing to call": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "only tools that are not there": ({"tools": [SEARCH]}, "tools.0.type"),
    "no tool named": ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "a system block that is none": ({"system": [IMAGE]}, "system.0"),
    "a thread": ({"thread": {"type": "create"}}, "thread"),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_kept_is_refused_by_its_place(fields: Json, param: str) -> None:
    with pytest.raises((UnisonoError, ValidationError)) as caught:
        understood(**fields)
    failure = failure_of(caught.value)
    assert failure.status == 400
    assert (failure.param or "").startswith(param)
