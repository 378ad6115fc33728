"""MCP servers with `defer_loading`: the model reads their tools after the gateway's search found them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.api.responses.folding import fold
from tests.e2e.gateway import config_of, gateway
from tests.e2e.hosting import DOCS, calls, desk, hosts, made, result
from tests.e2e.replicas import LEASE_S, Client, Told
from tests.e2e.responses import ANSWER, Json, Line, kinds
from tests.e2e.test_added_tools import called, is_extended
from tests.e2e.test_tool_search_interrupted import MANY, until_searching
from tests.e2e.test_traces import document_of
from tests.e2e.wires import ENCODING, WIRES, asked
from tests.fakes import FakeVllm
from tests.mcp.conftest import Upstream
from unisono.cli.trace import is_as_recorded, read_document

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEARCH = {"type": "tool_search"}
DEFERRED: Json = {**DOCS, "defer_loading": True, "server_description": "Manuals."}
TOOLS = [SEARCH, DEFERRED]
PAY: Json = {"type": "function", "name": "pay", "description": "Told bills.", "defer_loading": True}
ASKED = {"type": "message", "role": "user", "content": "Go."}
SEARCHES = called("tool_search", '{"query": "told"}')
ECHO = "type docs__echo = (_: {"

both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES)
async def harness(upstream: Upstream, request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with desk(upstream, WIRES[request.param]) as running:
        yield running


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("stored", [False, True], ids=["resent", "stored"])
@both_forms
async def test_a_tool_of_a_deferred_server_is_found_and_run(harness: Line, stream: bool, stored: bool) -> None:
    fields: Json = {"tools": [*TOOLS, PAY], "stream": stream, "store": stored}
    harness.say(SEARCHES, calls("echo", text="hello"), ANSWER, ANSWER)
    first = await harness.responds(input=[ASKED], **fields)
    before, found, after = harness.prompts
    assert "docs: Manuals." in before
    assert [name for name in ("docs__", "pay", "told") if name in before] == []
    assert "Found: pay, docs__echo" in found
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
async def test_the_model_reads_about_no_tool_that_was_not_found(harness: Line, stream: bool) -> None:
    harness.say(calls("nothing"), SEARCHES, calls("nothing"), called("nowhere", "{}"), ANSWER)
    response = await harness.responds(input=[ASKED], tools=[*TOOLS, {**PAY, "defer_loading": False}], stream=stream)
    assert "There is no tool 'docs__nothing'. There is: pay, tool_search.<|end|>" in harness.prompts[1]
    assert "There is no tool 'docs__nothing'. There is: docs__echo.<|end|>" in harness.prompts[3]
    informed = "There is no tool 'nowhere'. Call one of these instead, or answer without: "
    assert f"{informed}pay, tool_search, docs__echo.<|end|>" in harness.prompts[4]
    assert [call["server_label"] for call in made(response)] == ["docs", "docs"]


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


@pytest.mark.parametrize("stored", [False, True], ids=["resent", "stored"])
async def test_functions_and_server_tools_that_were_found_stay_in_their_order(harness: Line, stored: bool) -> None:
    fields: Json = {"tools": [*TOOLS, PAY, {**PAY, "name": "ask", "defer_loading": False}], "store": stored}
    harness.say(called("tool_search", '{"query": "told, echo"}'), called("ask", "{}"), ANSWER)
    first = await harness.whole(input=[ASKED], **fields)
    answered = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "Yes."}
    following: Json = {"previous_response_id": first["id"], "input": [answered]}
    await harness.whole(**following if stored else {"input": [ASKED, *first["output"], answered]}, **fields)
    assert is_extended(harness)
    assert [harness.prompts[-1].count(text) for text in (ECHO, "type pay = ")] == [1, 1]


@pytest.mark.parametrize("tools", [[DEFERRED], [{**SEARCH, "execution": "client"}, DEFERRED]], ids=["none", "client"])
async def test_without_the_gateways_search_a_server_is_not_deferred(harness: Line, tools: list[Json]) -> None:
    harness.say(calls("echo", text="hello"), ANSWER)
    response = await harness.whole(input=[ASKED], tools=tools)
    assert ECHO in harness.prompts[0]
    assert made(response)[0]["output"] == "hello"
    [note] = response["unisono"]["notes"]
    assert note.startswith(f"tools.{len(tools) - 1}.defer_loading: no effect, because the gateway does not search")


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


# Searches before, the call that the model then has to make, and the recipient that the gateway opens.
RECORDED: dict[str, tuple[list[str], str, str]] = {
    "nothing was found": ([], '{"query": "told"}<|call|>', "to=functions.tool_search"),
    "a tool was found before": ([SEARCHES], 'docs__echo<|message|>{"text":"hello"}<|call|>', "to=functions"),
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("stored", [False, True], ids=["resent", "stored"])
@pytest.mark.parametrize(("searches", "call", "opened"), RECORDED.values(), ids=RECORDED)
async def test_a_required_call_beside_a_deferred_server_is_recorded_and_replays_identically(
    upstream: Upstream, searches: list[str], call: str, opened: str, stored: bool
) -> None:
    async with desk(upstream, unisono={"traces": {"mode": "all"}}) as line:
        line.say(*searches, ANSWER)
        first = await line.whole(input=[ASKED], tools=TOOLS)
        line.say(ANSWER, call, ANSWER)
        following: Json = {"previous_response_id": first["id"], "input": [ASKED]}
        if not stored:
            following = {"input": [ASKED, *first["output"], ASKED]}
        answer = await line.post(**following, tools=TOOLS, tool_choice="required")
        assert kinds(answer.body["output"])[-1] == "message"
        assert opened in line.prompts[1].removeprefix(line.prompts[0])
        document = await document_of(line.gateway, answer)
        assert is_as_recorded(document, read_document(document))


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


async def test_a_deferred_server_that_cannot_be_reached_has_nothing_to_find(upstream: Upstream) -> None:
    async with desk(upstream, entry={"url": "http://127.0.0.1:9/mcp"}) as line:
        line.say(SEARCHES, ANSWER)
        response = await line.whole(input=[ASKED], tools=TOOLS)
        assert made(response, "mcp_list_tools")[0]["error"]
        assert made(response, "tool_search_output")[0]["tools"] == []
        assert response["status"] == "completed"


@pytest.mark.parametrize("stored", [False, True], ids=["resent", "stored"])
async def test_a_tool_whose_name_is_taken_is_found_under_another_name(harness: Line, stored: bool) -> None:
    fields: Json = {"tools": [*TOOLS, {"type": "function", "name": "docs__echo"}], "store": stored}
    harness.say(SEARCHES, called("docs__echo", "{}"), ANSWER)
    first = await harness.whole(input=[ASKED], **fields)
    [server] = made(first, "tool_search_output")[0]["tools"]
    assert server["allowed_tools"] == ["echo"]
    [call] = made(first, "function_call")
    answered = {"type": "function_call_output", "call_id": call["call_id"], "output": "Yes."}
    following: Json = {"previous_response_id": first["id"], "input": [answered]}
    if not stored:
        following = {"input": [ASKED, *first["output"], answered]}
    await harness.whole(**following, **fields)
    assert is_extended(harness)
    assert harness.prompts[-1].count("type docs_echo_") == 1


async def test_a_conversation_declares_a_found_tool_once(harness: Line) -> None:
    fields: Json = {"conversation": await harness.conversation(), "tools": TOOLS}
    harness.say(SEARCHES, ANSWER, SEARCHES, ANSWER, ANSWER)
    for _ in range(3):
        await harness.whole(input=[ASKED], **fields)
    assert [harness.prompts[-1].count(text) for text in ("Found: docs__echo", ECHO)] == [2, 1]


async def test_counted_tokens_are_those_of_the_prompt(harness: Line) -> None:
    harness.say(ANSWER)
    counted = await harness.post("/input_tokens", input=[ASKED], tools=TOOLS)
    response = await harness.whole(input=[ASKED], tools=TOOLS)
    assert counted.body["input_tokens"] == response["usage"]["input_tokens"]
    every = await harness.post("/input_tokens", input=[ASKED], tools=[DOCS])
    assert counted.body["input_tokens"] < every.body["input_tokens"]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("grace_s", [5.0, 0.01], ids=["in time", "late"])
async def test_a_search_among_servers_continues_after_a_handover(
    upstream: Upstream, tmp_path: Path, grace_s: float
) -> None:
    async with FakeVllm(tokens=[]) as fake, aiohttp.ClientSession() as session:
        wire = WIRES["vllm"]

        def script(body: Json) -> Any:
            prompt = ENCODING.decode(body["prompt"])
            answer = ANSWER if "hello" in prompt else calls("echo", text="hello")
            return wire.script(answer if "Found: " in prompt else SEARCHES)

        fake.script = script
        store = {"url": f"sqlite:///{tmp_path}/state.db", "deadline_s": 5, "lease_s": LEASE_S}
        config = config_of(f"vllm@{fake.url}", store=store, **hosts(upstream))
        async with gateway(config) as first:
            assert first.app is not None
            body = {"model": "gpt-oss", "input": [ASKED], "tools": [*TOOLS, *MANY], "background": True}
            response = await Client(first.url, session).post("/v1/responses", body)
            await until_searching(fake)
            await first.app.state.gateway.hand_over(grace_s)
        async with gateway(config) as second:
            client = Client(second.url, session)
            ended = await client.over(response["id"])
            received = await client.resumes(Told(), response["id"])
        assert fold(received.events).response == ended
        assert [call["output"] for call in made(ended)] == ["hello"]
        assert [tool["allowed_tools"] for tool in made(ended, "tool_search_output")[0]["tools"]] == [["echo"]]
        prompts = [request.json["prompt"] for request in asked(fake)]
        assert prompts[-1][: len(prompts[0])] == prompts[0]
        assert ENCODING.decode(prompts[-1]).count(ECHO) == 1
