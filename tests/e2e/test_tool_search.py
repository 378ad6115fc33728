"""Search for deferred tools that the gateway runs, in Responses and in Messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.messages import message_in
from tests.e2e.responses import ANSWER, THOUGHT, Json, Line, kinds, line
from tests.e2e.surfaces import unisono_object
from tests.e2e.test_added_tools import called, is_extended
from tests.e2e.test_responses_websocket import connected
from tests.e2e.wires import ENCODING, WIRES

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
SEARCH = {"type": "tool_search"}
NOW = {"type": "function", "name": "now", "description": "The time.", "parameters": SCHEMA}
LOOK = {"type": "function", "name": "look", "description": "Look at a star.", "parameters": SCHEMA}
STARS = {
    "type": "namespace",
    "name": "sky",
    "description": "Astronomy.",
    "tools": [
        {**LOOK, "defer_loading": True},
        {**LOOK, "name": "moon", "description": "Moons.", "defer_loading": True},
    ],
}
PAY = {"type": "function", "name": "pay", "description": "Pay a bill.", "parameters": SCHEMA, "defer_loading": True}
TOOLS = [SEARCH, NOW, STARS, PAY]
KINDS = ("tool_search_call", "tool_search_output")
ASKED = {"type": "message", "role": "user", "content": "Which one is this?"}
SEARCHES = called("tool_search", '{"query": "stars"}')
LOOKS = called("sky__look", '{"at":"north"}')

both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with line(WIRES[request.param]) as running:
        yield running


@pytest.mark.parametrize("stored", [False, True], ids=["resent", "stored"])
@both_forms
async def test_the_gateway_finds_a_tool_and_the_model_calls_it(harness: Line, stream: bool, stored: bool) -> None:
    fields: Json = {"tools": TOOLS, "stream": stream, "store": stored}
    harness.say(SEARCHES, LOOKS, ANSWER)
    first = await harness.responds(input=[ASKED], **fields)
    assert "type now" in harness.prompts[0]
    assert "type tool_search = (_: {" in harness.prompts[0]
    assert "sky: Astronomy." in harness.prompts[0]
    assert [name for name in ("look = ", "moon", "pay") if name in harness.prompts[0]] == []
    assert is_extended(harness)
    assert "Found: sky__look<|end|><|start|>developer<|message|># Tools" in harness.prompts[1]
    assert harness.prompts[1].count("type sky__look = (_: {") == 1
    assert "moon" not in harness.prompts[1]
    assert [kind for kind in kinds(first["output"]) if kind != "reasoning"] == [
        "tool_search_call",
        "tool_search_output",
        "function_call",
    ]
    search, found, call = [item for item in first["output"] if item["type"] != "reasoning"]
    by_server = {"execution": "server", "call_id": None, "status": "completed"}
    assert search == {"id": search["id"], "type": "tool_search_call", **by_server, "arguments": {"query": "stars"}}
    [namespace] = found.pop("tools")
    assert found == {"id": found["id"], "type": "tool_search_output", **by_server}
    assert (namespace["name"], namespace["description"]) == ("sky", "Astronomy.")
    assert [tool["name"] for tool in namespace["tools"]] == ["look"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("sky", "look", '{"at":"north"}')
    assert "notes" not in first["unisono"]
    found["tools"] = [namespace]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Polaris"}
    if stored:
        await harness.responds(previous_response_id=first["id"], input=[result], **fields)
        assert [item["type"] for item in (await harness.kept(first))["output"]] == kinds(first["output"])
    else:
        await harness.responds(input=[ASKED, *first["output"], result], **fields)
    # What was found stays where it was found, token by token.
    assert is_extended(harness)
    assert harness.prompts[2].count("type sky__look = (_: {") == 1


async def test_a_search_runs_in_the_background_and_over_a_websocket(harness: Line) -> None:
    harness.say(SEARCHES, LOOKS)
    response = await harness.whole(input=[ASKED], tools=TOOLS, background=True)
    async with asyncio.timeout(20):
        while response["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
            response = await harness.kept(response)
    harness.say(SEARCHES, LOOKS, ANSWER)
    async with connected(harness.gateway) as client:
        await client.send(input=[ASKED], tools=TOOLS, store=False)
        over_socket = await client.answer()
        assert kinds(over_socket["output"]) == kinds(response["output"])
        call = over_socket["output"][-1]
        assert (call["namespace"], call["name"]) == ("sky", "look")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Polaris"}
        await client.send(input=[result], tools=TOOLS, store=False, previous_response_id=over_socket["id"])
        await client.answer()
    assert is_extended(harness)
    assert harness.prompts[-1].count("type sky__look = (_: {") == 1


@both_forms
async def test_a_search_that_finds_nothing_says_so(harness: Line, stream: bool) -> None:
    harness.say(called("tool_search", '{"query": "weather"}'), ANSWER)
    response = await harness.responds(input=[ASKED], tools=TOOLS, stream=stream)
    assert "No tool was found." in harness.prompts[1]
    [found] = [item for item in response["output"] if item["type"] == "tool_search_output"]
    assert found["tools"] == []
    assert response["output"][-1]["type"] == "message"


@both_forms
async def test_searches_that_are_sent_back_lead_to_the_same_prompt(harness: Line, stream: bool) -> None:
    nothing, bills = called("tool_search", "{}"), called("tool_search", '{"query":"weather, bill"}')
    harness.say(SEARCHES, nothing, bills, SEARCHES, LOOKS, ANSWER)
    fields: Json = {"tools": TOOLS, "store": False, "stream": stream}
    first = await harness.responds(input=[ASKED], **fields)
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "Polaris"}
    await harness.responds(input=[ASKED, *first["output"], result], **fields)
    assert is_extended(harness)
    # A tool is declared once, where it was found first.
    assert [harness.prompts[-1].count(f"type {name} = ") for name in ("sky__look", "pay", "sky__moon")] == [1, 1, 0]


INNER: Json = {**STARS, "name": "far", "tools": [{**LOOK, "defer_loading": True}]}
OUTER: Json = {**STARS, "tools": [STARS["tools"][0], INNER, STARS["tools"][1]]}
AGAIN: Json = {**STARS, "tools": [{**LOOK, "name": "star", "defer_loading": True}]}
TELESCOPE: Json = {"type": "additional_tools", "role": "developer", "tools": [SEARCH, {**PAY, "name": "telescope"}]}
# Items before the question, tools, and the names that the model reads after a search for several words.
ORDERS: dict[str, tuple[list[Json], list[Json], str]] = {
    "by their rank": ([], [SEARCH, NOW, {**PAY, "description": "Pay."}, STARS], "pay, sky__look, sky__moon"),
    "a namespace within another": ([], [SEARCH, NOW, OUTER], "sky__look, sky__far__look, sky__moon"),
    "one namespace twice": ([], [SEARCH, NOW, STARS, PAY, AGAIN], "sky__look, sky__moon, pay, sky__star"),
    "tools of an item": ([TELESCOPE], [SEARCH, NOW, STARS], "telescope, sky__look, sky__moon"),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("returned", ["resent", "by id", "stored"])
@pytest.mark.parametrize(("items", "tools", "names"), ORDERS.values(), ids=ORDERS)
async def test_what_was_found_stays_in_its_order(
    harness: Line, items: list[Json], tools: list[Json], names: str, returned: str
) -> None:
    fields: Json = {"tools": tools, "store": returned != "resent"}
    harness.say(called("tool_search", '{"query":"moon star bill pay"}'), called("now", '{"at":"x"}'), ANSWER)
    first = await harness.whole(input=[*items, ASKED], **fields)
    assert f"Found: {names}" in harness.prompts[1]
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "noon"}
    following: Json = {"input": [*items, ASKED, *first["output"], result]}
    if returned == "stored":
        following = {"previous_response_id": first["id"], "input": [result]}
    await harness.whole(**following, **fields)
    assert is_extended(harness)


@pytest.mark.parametrize("tools", [[SEARCH, NOW], [SEARCH, {**NOW, "name": "tool_search"}, PAY]], ids=["none", "taken"])
async def test_without_a_search_all_tools_are_declared(harness: Line, tools: list[Json]) -> None:
    harness.say(ANSWER)
    response = await harness.whole(input=[ASKED], tools=tools)
    assert [tool["name"] for tool in tools[1:] if f"type {tool['name']} = " not in harness.prompts[0]] == []
    notes = ["tools.0: no effect, because the model sees all tools from the start"]
    if PAY in tools:
        notes.append("tools.2.defer_loading: no effect, because the request has no search for tools")
    assert response["unisono"]["notes"] == notes


# Where the request has the search and the deferred tools.
PLACES: dict[str, Json] = {
    "all in an item": {"input": [{"type": "additional_tools", "role": "developer", "tools": TOOLS}, ASKED]},
    "the deferred tools in an item": {
        "input": [ASKED, {"type": "additional_tools", "role": "developer", "tools": [STARS, PAY]}, ASKED],
        "tools": [SEARCH, NOW],
    },
}


@pytest.mark.parametrize("fields", PLACES.values(), ids=PLACES)
@both_forms
async def test_tools_of_an_item_are_deferred_too(harness: Line, fields: Json, stream: bool) -> None:
    harness.say(SEARCHES, LOOKS, called("tool_search", '{"query":"bill"}'), called("pay", '{"at":"x"}'))
    first = await harness.responds(stream=stream, **fields)
    assert [name for name in ("type sky__look", "type pay") if name in harness.prompts[0]] == []
    assert "notes" not in first["unisono"]
    call = first["output"][-1]
    assert (call["namespace"], call["name"]) == ("sky", "look")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Polaris"}
    more = {"tools": fields["tools"]} if "tools" in fields else {}
    second = await harness.responds(stream=stream, previous_response_id=first["id"], input=[result], **more)
    # The next response searches among the same tools.
    assert second["output"][-1]["name"] == "pay"
    assert is_extended(harness)
    assert [harness.prompts[-1].count(f"type {name} = ") for name in ("sky__look", "pay", "sky__moon")] == [1, 1, 0]


async def test_a_search_of_the_client_defers_the_tools_beside_it(harness: Line) -> None:
    tools = [{**SEARCH, "execution": "client"}, STARS, PAY]
    harness.say(SEARCHES)
    await harness.whole(input=[{"type": "additional_tools", "role": "developer", "tools": tools}, ASKED])
    assert [name for name in ("tool_search", "look", "pay") if f"type {name}" in harness.prompts[0]] == ["tool_search"]


# Names of deferred tools in `tool_choice`, and the tools that are declared from the start.
NAMED: dict[str, tuple[Json, list[str]]] = {
    "a tool": ({"type": "function", "name": "pay"}, ["pay"]),
    "a tool of a namespace": ({"type": "function", "name": "look"}, ["sky__look"]),
    "a list": ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "pay"}]}, ["pay"]),
    "the search, too": (
        {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH, {"type": "function", "name": "pay"}]},
        [],
    ),
}


@pytest.mark.parametrize(("choice", "names"), NAMED.values(), ids=NAMED)
async def test_a_named_tool_is_declared_from_the_start(harness: Line, choice: Json, names: list[str]) -> None:
    harness.say(ANSWER)
    await harness.whole(input=[ASKED], tools=TOOLS, tool_choice=choice, max_output_tokens=50)
    deferred = ("sky__look", "sky__moon", "pay")
    assert [name for name in deferred if f"type {name} = " in harness.prompts[0]] == names


async def test_a_named_tool_that_was_found_stays_where_it_was_found(harness: Line) -> None:
    harness.say(SEARCHES, LOOKS, ANSWER)
    first = await harness.whole(input=[ASKED], tools=TOOLS)
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "Polaris"}
    choice = {"type": "function", "name": "look"}
    fields: Json = {"tools": TOOLS, "tool_choice": choice, "max_output_tokens": 50}
    await harness.whole(input=[result], previous_response_id=first["id"], **fields)
    prompts = [ENCODING.encode_marked(prompt) for prompt in harness.prompts[1:3]]
    assert prompts[1][: len(prompts[0])] == prompts[0]


@both_forms
async def test_a_search_may_be_in_a_list_of_allowed_tools(harness: Line, stream: bool) -> None:
    harness.say(SEARCHES, LOOKS)
    choice: Json = {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH, {"type": "function", "name": "look"}]}
    response = await harness.responds(input=[ASKED], tools=TOOLS, tool_choice=choice, stream=stream)
    assert kinds(response["output"])[-3:] == ["tool_search_output", "reasoning", "function_call"]


@pytest.mark.parametrize("stored", [False, True], ids=["resent", "stored"])
@both_forms
async def test_two_searches_at_once_declare_each_tool_once(harness: Line, stream: bool, stored: bool) -> None:
    fields: Json = {"tools": TOOLS, "stream": stream, "store": stored}
    both = called("tool_search", '{"query":"bill, star"}').removeprefix(THOUGHT)
    harness.say(f"{SEARCHES}<|start|>assistant{both}", LOOKS, ANSWER)
    first = await harness.responds(input=[ASKED], **fields)
    assert kinds(first["output"])[1:5] == ["tool_search_call", "tool_search_output"] * 2
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "Polaris"}
    following: Json = {"previous_response_id": first["id"], "input": [result]}
    if not stored:
        following = {"input": [ASKED, *first["output"], result]}
    await harness.responds(**following, **fields)
    for prompt in harness.prompts[1:3]:
        assert [prompt.count(f"type {name} = ") for name in ("sky__look", "pay", "sky__moon")] == [1, 1, 0]
        assert prompt.count("Found: ") == 2


@both_forms
@pytest.mark.parametrize(
    ("arguments", "error", "max_calls"), [('{"query":"bill"}', "No calls are left.", 1), ("bill", "JSON", 2)]
)
async def test_a_search_that_did_not_run_is_incomplete(
    harness: Line, arguments: str, error: str, max_calls: int, stream: bool
) -> None:
    fields: Json = {"tools": TOOLS, "stream": stream, "store": stream, "max_tool_calls": max_calls}
    harness.say(SEARCHES, called("tool_search", arguments), ANSWER, ANSWER)
    first = await harness.responds(input=[ASKED], **fields)
    assert error in harness.prompts[2]
    assert "type pay" not in harness.prompts[2]
    searches = [(item["type"], item["status"]) for item in first["output"] if "tool_search" in item["type"]]
    assert searches == [(kind, status) for status in ("completed", "incomplete") for kind in KINDS]
    if stream:
        assert [item.get("status") for item in (await harness.kept(first))["output"]] == [
            item.get("status") for item in first["output"]
        ]
        await harness.responds(previous_response_id=first["id"], input=[ASKED], **fields)
    else:
        await harness.responds(input=[ASKED, *first["output"], ASKED], **fields)
    # The items of a `store: false` response do not contain the error.
    assert (error if stream else "No tool was found.") in harness.prompts[3]


@both_forms
async def test_a_call_beside_a_search_goes_to_the_client(harness: Line, stream: bool) -> None:
    search, call = SEARCHES, called("now", '{"at":"x"}').removeprefix(THOUGHT)
    harness.say(f"{search}<|start|>assistant{call}", LOOKS)
    fields: Json = {"tools": TOOLS, "stream": stream}
    first = await harness.responds(input=[ASKED], **fields)
    assert len(harness.prompts) == 1
    assert sorted(kinds(first["output"])) == ["function_call", "reasoning", "tool_search_call", "tool_search_output"]
    [now] = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": now["call_id"], "output": "noon"}
    second = await harness.responds(input=[result], previous_response_id=first["id"], **fields)
    assert harness.prompts[1].count("type sky__look = (_: {") == 1
    assert second["output"][-1]["name"] == "look"


@both_forms
async def test_a_call_of_a_tool_that_was_not_found_goes_to_the_client(harness: Line, stream: bool) -> None:
    harness.say(LOOKS)
    response = await harness.responds(input=[ASKED], tools=TOOLS, stream=stream)
    assert (response["output"][-1]["type"], response["output"][-1]["name"]) == ("function_call", "look")


SUMMARY = "<|channel|>final<|message|>Stars.<|return|>"


@pytest.mark.parametrize("way", ["trigger", "endpoint", "threshold"])
async def test_a_found_tool_can_be_called_after_a_compaction(harness: Line, way: str) -> None:
    long = {**ASKED, "content": "Which star is this? " * 500}
    fields: Json = {"tools": TOOLS, "store": False}
    harness.say(SEARCHES, LOOKS, ANSWER)
    first = await harness.whole(input=[long], **fields)
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "Polaris"}
    history = [long, *first["output"], result]
    harness.say(SUMMARY, LOOKS)
    if way == "threshold":
        limits = [{"type": "compaction", "compact_threshold": 1000}]
        answer = await harness.whole(input=[*history, ASKED], context_management=limits, **fields)
    else:
        if way == "trigger":
            compacted = await harness.whole(input=[*history, {"type": "compaction_trigger"}], **fields)
        else:
            compacted = dict((await harness.made("/responses/compact", model="gpt-oss", input=history)).body)
        answer = await harness.whole(input=[*compacted["output"], ASKED], **fields)
    assert len(harness.prompts) == 2
    assert "as you wrote it]" in harness.prompts[1]
    assert [harness.prompts[1].count(f"type {name} = ") for name in ("sky__look", "pay")] == [1, 0]
    assert answer["output"][-1]["name"] == "look"


async def test_no_search_is_offered_if_no_tool_may_be_called(harness: Line) -> None:
    harness.say(ANSWER)
    await harness.whole(input=[ASKED], tools=TOOLS, tool_choice="none")
    assert "tool_search" not in harness.prompts[0]


# Type of Anthropic's search, its name, and the arguments that find `look`.
SEARCH_TYPES = {
    "tool_search_tool_bm25_20251119": ("tool_search_tool_bm25", '{"query": "stars"}'),
    "tool_search_tool_regex_20251119": ("tool_search_tool_regex", '{"pattern": "(?i)STAR$|star\\\\."}'),
}
IN_MESSAGES: list[Json] = [
    {"name": "now", "description": "The time.", "input_schema": SCHEMA},
    {"name": "look", "description": "Look at a star.", "input_schema": SCHEMA, "defer_loading": True},
    {"name": "pay", "description": "Pay a bill.", "input_schema": SCHEMA, "defer_loading": True},
]
QUESTION = {"role": "user", "content": "Which one is this?"}


async def send(harness: Line, stream: bool, **fields: Any) -> Json:
    answer = await harness.gateway.messages(
        **{"model": "gpt-oss", "max_tokens": 1000, "messages": [QUESTION], "stream": stream, **fields}
    )
    return message_in(answer)


@both_forms
@pytest.mark.parametrize(("kind", "name", "arguments"), [(kind, *case) for kind, case in SEARCH_TYPES.items()])
async def test_anthropics_searches_run_in_the_gateway(
    harness: Line, kind: str, name: str, arguments: str, stream: bool
) -> None:
    tools = [{"type": kind, "name": name}, *IN_MESSAGES]
    harness.say(called(name, arguments), called("look", '{"at":"north"}'), ANSWER)
    message = await send(harness, stream, tools=tools)
    assert [text for text in ("type now", f"type {name} = (_: {{") if text not in harness.prompts[0]] == []
    assert [text for text in ("type look", "type pay") if text in harness.prompts[0]] == []
    assert is_extended(harness)
    assert harness.prompts[1].count("type look = (_: {") == 1
    assert [block["type"] for block in message["content"]] == [
        "server_tool_use",
        "tool_search_tool_result",
        "tool_use",
    ]
    use, result, call = message["content"]
    assert (use["name"], call["name"], message["stop_reason"]) == (name, "look", "tool_use")
    assert result["tool_use_id"] == use["id"]
    assert result["content"]["type"] == "tool_search_tool_search_result"
    assert result["content"]["tool_references"] == [{"type": "tool_reference", "tool_name": "look"}]
    assert "notes" not in message["unisono"]
    said = {"role": "assistant", "content": message["content"]}
    answered = {"type": "tool_result", "tool_use_id": call["id"], "content": "Polaris"}
    await send(harness, stream, tools=tools, messages=[QUESTION, said, {"role": "user", "content": [answered]}])
    assert is_extended(harness)
    assert harness.prompts[2].count("type look = (_: {") == 1


async def test_a_foreign_search_result_declares_its_tools(harness: Line) -> None:
    harness.say(ANSWER)
    use = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "tool_search_tool_bm25", "input": {"query": "star"}}
    references = [{"type": "tool_reference", "tool_name": "look"}]
    content = {"type": "tool_search_tool_search_result", "tool_references": references}
    result = {"type": "tool_search_tool_result", "tool_use_id": "srvtoolu_1", "content": content}
    said = {"role": "assistant", "content": [use, result, {"type": "text", "text": "It is a star."}]}
    tools = [{"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}, *IN_MESSAGES]
    await send(harness, False, tools=tools, messages=[QUESTION, said, QUESTION])
    assert "Found: look<|end|><|start|>developer<|message|># Tools" in harness.prompts[0]
    assert harness.prompts[0].count("type look = (_: {") == 1


@both_forms
async def test_a_pattern_that_cannot_be_used_is_an_error_for_the_model(harness: Line, stream: bool) -> None:
    tools = [{"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}, *IN_MESSAGES]
    harness.say(called("tool_search_tool_regex", '{"pattern": "("}'), ANSWER)
    message = await send(harness, stream, tools=tools)
    [result] = [block for block in message["content"] if block["type"] == "tool_search_tool_result"]
    assert result["content"]["type"] == "tool_search_tool_result_error"
    assert result["content"]["error_code"] == "invalid_tool_input"
    assert "'pattern' cannot be used" in harness.prompts[1]


async def test_a_search_of_anthropic_without_deferred_tools_is_left_out(harness: Line) -> None:
    harness.say(ANSWER)
    tools = [{"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}, IN_MESSAGES[0]]
    answer = await harness.gateway.messages(model="gpt-oss", max_tokens=100, messages=[QUESTION], tools=tools)
    [note] = unisono_object(answer)["notes"]
    assert note.startswith("tools.0.type: skipped")


@pytest.mark.sampled(one_in=2)
@both_forms
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "foreign"])
async def test_searches_in_messages_lead_to_the_same_prompt(harness: Line, stream: bool, sealed: bool) -> None:
    name = "tool_search_tool_bm25"
    tools = [{"type": f"{name}_20251119", "name": name}, *IN_MESSAGES]
    look = called("look", '{"at":"north"}')
    harness.say(called(name, '{"query":"star"}'), called(name, '{"query":"zebra"}'), called(name, "{}"), look, ANSWER)
    message = await send(harness, stream, tools=tools)
    for block in message["content"]:
        if block["type"] == "tool_search_tool_result" and not sealed:
            del block["content"]["encrypted_content"]
    answered = {"type": "tool_result", "tool_use_id": message["content"][-1]["id"], "content": "Polaris"}
    history = [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": [answered]}]
    choice = {"type": "tool", "name": "look"}
    await send(harness, stream, tools=tools, messages=[QUESTION, *history])
    await send(harness, stream, tools=tools, messages=[QUESTION, *history], tool_choice=choice, max_tokens=50)
    first, *later = (ENCODING.encode_marked(prompt) for prompt in harness.prompts[3:6])
    assert [prompt[: len(first)] == first for prompt in later] == [True, True]
    assert harness.prompts[5].count("type look = (_: {") == 1


async def test_a_search_of_anthropic_can_be_required(harness: Line) -> None:
    name = "tool_search_tool_bm25"
    tools = [{"type": f"{name}_20251119", "name": name}, *IN_MESSAGES]
    answer = await harness.gateway.messages(
        model="gpt-oss", max_tokens=50, messages=[QUESTION], tools=tools, tool_choice={"type": "tool", "name": name}
    )
    assert answer.status == 200, answer.raw
    assert "type look" not in harness.prompts[0]
