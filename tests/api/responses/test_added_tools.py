"""Tools that arrive as input items: `additional_tools`, and the search for tools that the client runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.responses.frames import ids, to_stored
from tests.api.responses.test_responses_inbound import items_of
from tests.api.responses.test_responses_schema import generation_of, refusal_of
from unisono.api.client_toolbox import CallForm
from unisono.api.responses.input_conversion import KnownState
from unisono.api.responses.items import call
from unisono.api.tool_search import NOTHING_FOUND
from unisono.core.conversation import AddedTools, AssistantCall, Conversation, FunctionTool, ToolResult, UserMessage
from unisono.core.item_records import to_item, to_record
from unisono.harmony.tool_declarations import declarations_by_message, plan_tools

Json = dict[str, Any]
ASKED = {"role": "user", "content": "Hi"}
FIND = {"type": "function", "name": "find", "description": "Find.", "parameters": {"type": "object", "properties": {}}}
EXEC = {"type": "custom", "name": "exec", "description": "Run.", "format": {"type": "text"}}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Look.", "parameters": {"type": "object"}}
DEFERRED = {**FIND, "name": "later", "defer_loading": True}
CRM = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [DEFERRED]}
SEARCHED = {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "x"}}


def added(*tools: Json) -> Json:
    return {"type": "additional_tools", "role": "developer", "tools": [*tools]}


def found(*tools: Json, call_id: str | None = "c1") -> Json:
    return {"type": "tool_search_output", "call_id": call_id, "execution": "client", "tools": [*tools]}


def conversation_of(*items: Json, **fields: Any) -> Conversation:
    return generation_of(input=[*items], **fields).request.conversation


def names_of(tools: tuple[FunctionTool, ...]) -> list[str]:
    return [tool.name for tool in tools]


# Tools of the item, and the names that the model knows.
DECLARATIONS: dict[str, tuple[Json, list[str]]] = {
    "a function": (added(FIND), ["find"]),
    "the plain namespace": (added({"type": "namespace", "name": "functions", "tools": [EXEC]}), ["exec"]),
    "a namespace": (added(CRM), ["crm__later"]),
    "a namespace in the plain one": (added({"type": "namespace", "name": "functions", "tools": [CRM]}), ["crm__later"]),
    "a namespace in another": (added({"type": "namespace", "name": "a", "tools": [CRM]}), ["a__crm__later"]),
    "a search": (added(SEARCH), ["tool_search"]),
    "unavailable tools beside others": (added({"type": "image_generation"}, FIND), ["find"]),
    "only unavailable tools": (added({"type": "image_generation"}), []),
    "no tools": (added(), []),
}


@pytest.mark.parametrize(("item", "names"), DECLARATIONS.values(), ids=DECLARATIONS)
def test_leading_tools_belong_to_the_first_developer_message(item: Json, names: list[str]) -> None:
    conversation = conversation_of(item, ASKED)
    assert names_of(conversation.preamble.tools) == names
    assert conversation.items == (UserMessage("Hi"),)


@pytest.mark.parametrize(("item", "names"), DECLARATIONS.values(), ids=DECLARATIONS)
def test_later_tools_keep_their_position(item: Json, names: list[str]) -> None:
    conversation = conversation_of(ASKED, item, ASKED)
    assert conversation.preamble.tools == ()
    assert names_of(conversation.tools) == names
    places = [index for index, each in enumerate(conversation.items) if isinstance(each, AddedTools)]
    assert places == ([1] if names else [])


def test_calls_of_added_tools_have_the_form_of_the_tool() -> None:
    nested = {"type": "namespace", "name": "a", "tools": [{"type": "namespace", "name": "b", "tools": [EXEC]}]}
    toolbox = generation_of(input=[ASKED, added(nested, FIND, SEARCH)]).toolbox
    wire = call("ctc_1", "c", "a__b__exec", "ls", toolbox, "completed")
    assert (wire["type"], wire["namespace"], wire["name"], wire["input"]) == ("custom_tool_call", "a__b", "exec", "ls")
    assert toolbox.form_of("find") is CallForm.FUNCTION
    wire = call("tsc_1", "c", "tool_search", '{"query": "x"}', toolbox, "completed")
    assert wire == {
        "id": "tsc_1",
        "type": "tool_search_call",
        "status": "completed",
        "call_id": "c",
        "execution": "client",
        "arguments": {"query": "x"},
    }


def test_a_new_definition_replaces_the_namespace_too() -> None:
    plain = {**FIND, "name": "crm__later"}
    toolbox = generation_of(input=[ASKED, added(CRM), added(plain)]).toolbox
    wire = call("fc_1", "c", "crm__later", "{}", toolbox, "completed")
    assert (wire["name"], "namespace" in wire) == ("crm__later", False)


OLD = {**FIND, "parameters": {"type": "object", "properties": {"old": {"type": "string"}}}}
SEARCHABLE = [{"type": "tool_search"}, {**FIND, "defer_loading": True}]
REPLACED = "the definition of 'find' has no effect, because 'tools' has a different one"


@pytest.mark.parametrize("item", [added(OLD), found(OLD)], ids=["added", "found"])
@pytest.mark.parametrize("stored", [False, True], ids=["sent", "stored"])
@pytest.mark.parametrize("tools", [[FIND], SEARCHABLE], ids=["plain", "deferred"])
def test_the_tools_of_the_request_replace_definitions_in_the_history(
    item: Json, stored: bool, tools: list[Json]
) -> None:
    history = [ASKED, SEARCHED, item]
    if stored:
        entries = generation_of(input=history).input
        known = KnownState(tuple(part for entry in entries for part in entry.meaning))
        generation = generation_of(known, input=[ASKED], tools=tools)
    else:
        generation = generation_of(input=[*history, ASKED], tools=tools)
        assert generation.notes == (f"input.2.tools: {REPLACED}",)
    conversation = generation.request.conversation
    assert [(tool.name, tool.parameters) for tool in conversation.all_tools] == [("find", FIND["parameters"])]
    assert [tool.parameters for tool in generation.toolbox.tools] == [FIND["parameters"]]
    planned = plan_tools(conversation.all_tools)
    first, later = declarations_by_message(conversation, planned)
    declared = [each for group in (first, *later.values()) for each in group]
    assert [each.name for each in declared] == ["find"]
    assert "old" not in str(declared)


def test_a_search_of_the_client_defines_the_deferred_tools_that_it_found() -> None:
    generation = generation_of(input=[ASKED, SEARCHED, found(OLD)], tools=[SEARCH, {**FIND, "defer_loading": True}])
    assert [tool.parameters for tool in generation.toolbox.tools if tool.name == "find"] == [OLD["parameters"]]
    assert generation.notes == ()


@pytest.mark.parametrize("arguments", ["", "{", '"x"'])
def test_a_search_with_any_arguments_is_returned(arguments: str) -> None:
    toolbox = generation_of(input=[ASKED], tools=[SEARCH]).toolbox
    expected = {"": {}, "{": "{", '"x"': "x"}[arguments]
    assert call("tsc_1", "c", "tool_search", arguments, toolbox, "completed")["arguments"] == expected


def test_deferred_tools_are_declared_when_they_are_found() -> None:
    tools = [SEARCH, FIND, DEFERRED, CRM]
    before = conversation_of(ASKED, tools=tools)
    assert names_of(before.tools) == ["tool_search", "find"]
    after = conversation_of(ASKED, SEARCHED, found(CRM), ASKED, tools=tools)
    assert after.preamble == before.preamble
    assert names_of(after.tools) == ["tool_search", "find", "crm__later"]
    assert after.items[1:3] == (
        AssistantCall("c1", "tool_search", '{"query":"x"}'),
        ToolResult("c1", "tool_search", "Found: crm__later"),
    )


def test_deferred_tools_are_declared_from_the_start_without_a_search() -> None:
    generation = generation_of(input=[ASKED], tools=[DEFERRED])
    assert names_of(generation.request.conversation.preamble.tools) == ["later"]
    assert generation.notes == ("tools.0.defer_loading: no effect, because the request has no search for tools",)


@pytest.mark.parametrize("search", [{"type": "tool_search"}, {"type": "tool_search", "execution": "server"}])
def test_deferred_tools_wait_for_a_search_of_the_gateway(search: Json) -> None:
    generation = generation_of(input=[ASKED], tools=[DEFERRED, FIND, search])
    conversation, server_tools = generation.request.conversation, generation.request.server_tools
    assert (names_of(conversation.preamble.tools), names_of(conversation.deferred)) == (["find"], ["later"])
    assert generation.notes == ()
    assert server_tools is not None
    assert server_tools.search is not None
    # A tool that was found before is not searched for again.
    again = generation_of(input=[ASKED, found(DEFERRED), ASKED], tools=[DEFERRED, FIND, search])
    assert names_of(again.request.conversation.deferred) == []


def test_results_of_parallel_calls_stay_with_their_calls() -> None:
    other = {"type": "function_call", "call_id": "c2", "name": "find", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c2", "output": "ok"}
    items = conversation_of(ASKED, SEARCHED, other, found(CRM), result).items
    assert [type(item).__name__ for item in items[1:]] == [
        "AssistantCall",
        "ToolResult",
        "AssistantCall",
        "ToolResult",
        "AddedTools",
    ]


def test_a_search_that_found_nothing_says_so() -> None:
    assert items_of([ASKED, SEARCHED, found()])[-1] == ToolResult("c1", "tool_search", NOTHING_FOUND)


def test_the_tools_of_another_servers_search_are_kept() -> None:
    items = items_of([ASKED, {**SEARCHED, "call_id": None, "execution": "server"}, found(CRM, call_id=None)])
    assert [type(item).__name__ for item in items] == ["UserMessage", "AssistantCall", "ToolResult", "AddedTools"]


MCP: Json = {"type": "mcp", "server_label": "docs", "allowed_tools": ["echo"]}
# Tools in the result of the gateway's search, the server tools among them, and the places of the tools with a note.
SERVER_TOOLS: dict[str, tuple[list[Json], list[str], list[int]]] = {
    "a server": ([MCP], ["docs__echo"], []),
    "a server without a label": ([{**MCP, "server_label": ""}, FIND], [], [0]),
    "a server without any label": ([{"type": "mcp", "allowed_tools": ["x y"]}, FIND], [], [0]),
    "a server without tools": ([{**MCP, "allowed_tools": []}, FIND], [], [0]),
    "a tool without a name": ([{**MCP, "allowed_tools": [""]}, FIND], [], [0]),
    "another server beside it": ([MCP, FIND, {"type": "mcp", "server_label": "mail"}], ["docs__echo"], [2]),
    "a function with the field": ([{**FIND, "allowed_tools": 1}], [], []),
    "another tool with the field": ([{"type": "image_generation", "allowed_tools": [1]}, MCP], ["docs__echo"], [0]),
}


@pytest.mark.parametrize(("tools", "names", "noted"), SERVER_TOOLS.values(), ids=SERVER_TOOLS)
def test_the_tools_of_servers_in_a_result_have_a_label_and_a_name(
    tools: list[Json], names: list[str], noted: list[int]
) -> None:
    search = {**SEARCHED, "call_id": None, "id": "tsc_1"}
    generation = generation_of(input=[ASKED, search, found(*tools, call_id=None)])
    added_tools = [item for item in generation.request.conversation.items if isinstance(item, AddedTools)]
    assert [tool.name for item in added_tools for tool in item.tools if tool.server] == names
    own = [tool.name for item in added_tools for tool in item.tools if not tool.server]
    assert own == [tool["name"] for tool in tools if tool["type"] == "function"]
    assert [note.partition(": ")[0] for note in generation.notes] == [f"input.2.tools.{place}.type" for place in noted]


def test_a_repeated_tool_is_no_error() -> None:
    assert names_of(conversation_of(added(FIND), added(FIND), ASKED, added(FIND), tools=[FIND]).tools) == ["find"]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([added({"type": "function"}), ASKED], "input.0.tools.0.name"),
        ([ASKED, added(FIND, FIND)], "input.1.tools.1.name"),
        ([ASKED, {"type": "additional_tools", "tools": "x"}], "input.1.tools"),
    ],
)
def test_an_invalid_tool_is_named(items: list[Json], param: str) -> None:
    assert refusal_of(input=items).param == param


def test_added_tools_survive_storage() -> None:
    [item] = [each for each in items_of([ASKED, added(FIND, EXEC, CRM, SEARCH)]) if isinstance(each, AddedTools)]
    assert to_item(to_record(item)) == item
    stored = to_stored(item, ids(), generation_of(input=[ASKED]).toolbox)
    assert stored.id.startswith("at_")
    assert items_of([ASKED, dict(stored.wire)])[-1] == item


def test_a_tool_that_was_deferred_in_an_item_is_restored_from_the_store() -> None:
    request = generation_of(input=[ASKED, added({"type": "tool_search"}, DEFERRED), ASKED])
    [tools] = [item for entry in request.input for item in entry.meaning if isinstance(item, AddedTools)]
    assert [tool.deferred for tool in tools.tools] == [True]
    assert to_item(to_record(tools)) == tools
    assert (names_of(request.request.conversation.tools), names_of(request.request.conversation.deferred)) == (
        [],
        ["later"],
    )
    assert request.notes == ()
