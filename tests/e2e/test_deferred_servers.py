"""MCP servers with `defer_loading`: the model reads their tools after the gateway's search found them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.hosting import DOCS, calls, desk, made, result
from tests.e2e.responses import ANSWER, Json, Line, kinds
from tests.e2e.test_added_tools import called, is_extended
from tests.e2e.wires import WIRES
from tests.mcp.conftest import Upstream, start_upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEARCH = {"type": "tool_search"}
DEFERRED: Json = {**DOCS, "defer_loading": True, "server_description": "Manuals."}
TOOLS = [SEARCH, DEFERRED]
PAY: Json = {"type": "function", "name": "pay", "description": "Told bills.", "defer_loading": True}
ASKED = {"type": "message", "role": "user", "content": "Go."}
SEARCHES = called("tool_search", '{"query": "told"}')
ECHO = "type docs__echo = (_: {"

both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with start_upstream(tmp_path_factory.mktemp("upstream")) as (_, found):
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES)
async def harness(upstream: Upstream, request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with desk(upstream, WIRES[request.param]) as running:
        yield running


@pytest.mark.parametrize("stored", [False, True], ids=["resent", "stored"])
@both_forms
async def test_a_tool_of_a_deferred_server_is_found_and_run(harness: Line, stream: bool, stored: bool) -> None:
    fields: Json = {"tools": [*TOOLS, PAY], "stream": stream, "store": stored}
    harness.say(SEARCHES, calls("echo", text="hello"), ANSWER, ANSWER)
    first = await harness.responds(input=[ASKED], **fields)
    before, found, after = harness.prompts
    assert "docs: Manuals." in before
    assert [name for name in ("docs__", "pay", "told") if name in before] == []
    assert "Found: docs__echo, pay" in found or "Found: pay, docs__echo" in found
    assert [found.count(text) for text in (ECHO, "type pay = ", "docs__facts", "Manuals.")] == [1, 1, 0, 1]
    assert after.startswith(found)
    assert result("echo", "hello") in after
    assert "notes" not in first["unisono"]
    [call] = made(first)
    assert (call["server_label"], call["name"], call["output"]) == ("docs", "echo", "hello")
    [search] = made(first, "tool_search_output")
    function, server = search["tools"]
    assert function["name"] == "pay"
    assert (server["type"], server["server_label"], server["allowed_tools"]) == ("mcp", "docs", ["echo"])
    assert server["defer_loading"] is True
    following: Json = {"previous_response_id": first["id"], "input": [ASKED]}
    if not stored:
        following = {"input": [ASKED, *first["output"], ASKED]}
    second = await harness.responds(**following, **fields)
    # The reasoning of a finished turn is left out; everything else stays where it was.
    assert harness.prompts[3].startswith(before)
    assert [harness.prompts[3].count(text) for text in (ECHO, "type pay = ", "docs__facts")] == [1, 1, 0]
    assert harness.prompts[3].index(ECHO) > harness.prompts[3].index("Found: ")
    assert "mcp_list_tools" not in kinds(second["output"])


@both_forms
async def test_a_search_that_is_sent_back_leads_to_the_same_prompt(harness: Line, stream: bool) -> None:
    fields: Json = {"tools": [*TOOLS, {**PAY, "name": "ask", "defer_loading": False}], "store": False, "stream": stream}
    nothing = called("tool_search", '{"query": "zebra"}')
    harness.say(SEARCHES, nothing, called("tool_search", '{"query":"facts"}'), called("ask", "{}"), ANSWER)
    first = await harness.responds(input=[ASKED], **fields)
    answered = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "Yes."}
    await harness.responds(input=[ASKED, *first["output"], answered], **fields)
    assert is_extended(harness)
    assert [harness.prompts[-1].count(f"type docs__{name} = ") for name in ("echo", "facts", "slow")] == [1, 1, 0]


@pytest.mark.parametrize("tools", [[DEFERRED], [{**SEARCH, "execution": "client"}, DEFERRED]], ids=["none", "client"])
async def test_without_the_gateways_search_a_server_is_not_deferred(harness: Line, tools: list[Json]) -> None:
    harness.say(calls("echo", text="hello"), ANSWER)
    response = await harness.whole(input=[ASKED], tools=tools)
    assert ECHO in harness.prompts[0]
    assert made(response)[0]["output"] == "hello"
    note = f"tools.{len(tools) - 1}.defer_loading: no effect, because the gateway does not search"
    assert response["unisono"]["notes"] == [note]


# `tool_choice`, whether the tools of the server are declared from the start, and the recipient that the gateway opens.
CHOICES: dict[str, tuple[Json | str, bool, str]] = {
    "the server": ({"type": "mcp", "server_label": "docs"}, True, ""),
    "a tool of the server": ({"type": "mcp", "server_label": "docs", "name": "echo"}, True, "functions.docs__echo"),
    "the search": ({"type": "tool_search"}, False, "functions.tool_search"),
    # The model must not call a tool that it does not know.
    "any tool": ("required", False, "functions.tool_search"),
}


@pytest.mark.parametrize(("choice", "is_declared", "opened"), CHOICES.values(), ids=CHOICES)
async def test_a_required_server_is_declared_from_the_start(
    harness: Line, choice: Any, is_declared: bool, opened: str
) -> None:
    harness.say(ANSWER)
    await harness.whole(input=[ASKED], tools=TOOLS, tool_choice=choice, max_output_tokens=50)
    assert (ECHO in harness.prompts[0]) is is_declared
    assert opened in harness.prompts[1].removeprefix(harness.prompts[0])


async def test_a_found_tool_may_need_an_approval(harness: Line) -> None:
    fields: Json = {"tools": [SEARCH, {**DEFERRED, "require_approval": "always"}]}
    harness.say(SEARCHES, calls("echo", text="hello"), ANSWER)
    first = await harness.whole(input=[ASKED], **fields)
    [asked] = made(first, "mcp_approval_request")
    approval = {"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": True}
    second = await harness.whole(input=[approval], previous_response_id=first["id"], **fields)
    assert made(second)[0]["output"] == "hello"
    assert is_extended(harness)
    assert harness.prompts[-1].count(ECHO) == 1


async def test_a_tool_that_was_not_found_can_be_called(harness: Line) -> None:
    harness.say(calls("echo", text="hello"), ANSWER)
    response = await harness.whole(input=[ASKED], tools=TOOLS)
    assert made(response)[0]["output"] == "hello"


async def test_a_server_that_is_left_out_later_declares_nothing(harness: Line) -> None:
    harness.say(SEARCHES, ANSWER, ANSWER)
    first = await harness.whole(input=[ASKED], tools=TOOLS)
    await harness.whole(input=[ASKED], tools=[SEARCH, PAY], previous_response_id=first["id"])
    assert ECHO not in harness.prompts[-1]


@pytest.mark.parametrize("way", ["trigger", "endpoint", "threshold"])
async def test_a_found_tool_can_be_called_after_a_compaction(harness: Line, way: str) -> None:
    long = {**ASKED, "content": "Which one is this? " * 500}
    fields: Json = {"tools": TOOLS, "store": False}
    harness.say(SEARCHES, ANSWER)
    first = await harness.whole(input=[long], **fields)
    history = [long, *first["output"], ASKED]
    harness.say("<|channel|>final<|message|>Manuals.<|return|>", calls("echo", text="hello"), ANSWER)
    if way == "threshold":
        limits = [{"type": "compaction", "compact_threshold": 1000}]
        await harness.whole(input=[*history, ASKED], context_management=limits, **fields)
    else:
        if way == "trigger":
            compacted = await harness.whole(input=[*history, {"type": "compaction_trigger"}], **fields)
        else:
            compacted = dict((await harness.made("/responses/compact", model="gpt-oss", input=history)).body)
        await harness.whole(input=[*compacted["output"], ASKED], **fields)
    assert [harness.prompts[1].count(text) for text in (ECHO, "docs__facts")] == [1, 0]
