"""Calls that are never emitted, and calls of deferred tools, on every API surface and both kinds of wire."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.gateway import Answer, message_of
from tests.e2e.messages import message_in
from tests.e2e.responses import ANSWER, Json, Line, line
from tests.e2e.test_added_tools import called
from tests.e2e.wires import WIRES

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA: Json = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK, HEAR = ({"name": name, "description": f"To {name}.", "input_schema": SCHEMA} for name in ("look", "hear"))
LOOKS = called("look", '{"at":"sky"}')
REMOVAL: Json = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}
ASKED: Json = {"role": "user", "content": "Hi"}
REMOVED: list[Json] = [ASKED, {"role": "system", "content": [REMOVAL]}]
UNMET = "The model did not call a tool that it had to call."

both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "mlx_server"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with line(WIRES[request.param]) as running:
        yield running


async def chat(harness: Line, *, stream: bool) -> Answer:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "hear")]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "hear"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    return await harness.gateway.chat(model="gpt-oss", messages=[ASKED], tools=tools, tool_choice=choice, stream=stream)


# Requests of the Messages API that force a call of `hear`.
FORCED: dict[str, Json] = {
    "removed": {"tool_choice": {"type": "any"}, "messages": REMOVED},
    "not named": {"tool_choice": {"type": "tool", "name": "hear"}, "messages": [ASKED]},
}


async def forced(harness: Line, name: str, *, stream: bool) -> tuple[str, list[str], str, Json]:
    """Return the text, the calls, the reason of the end, and the `unisono` object."""
    if name == "not allowed":
        said = message_of(await chat(harness, stream=stream))
        return said.content or "", [call[0] for call in said.calls], said.finish_reason, said.note
    answer = await harness.gateway.messages(model="gpt-oss", tools=[LOOK, HEAR], stream=stream, **FORCED[name])
    message = message_in(answer)
    text = "".join(block["text"] for block in message["content"] if block["type"] == "text")
    calls = [block["name"] for block in message["content"] if block["type"] == "tool_use"]
    return text, calls, message["stop_reason"], message["unisono"]


@pytest.mark.sampled(one_in=3)
@both_forms
@pytest.mark.parametrize("name", [*FORCED, "not allowed"])
async def test_a_call_that_is_not_allowed_is_returned_as_text_after_all_retries(
    harness: Line, name: str, stream: bool
) -> None:
    harness.say(LOOKS)
    text, calls, reason, about = await forced(harness, name, stream=stream)
    assert (text, calls) == ('look({"at":"sky"})', [])
    assert reason in ("stop", "end_turn")
    assert about["unmet"] == UNMET
    assert [note for note in about["notes"] if "does not declare or allow" in note]
    assert {"undeclared-tool", "tool-not-allowed"} & {*about["recoveries"]}


@pytest.mark.sampled(one_in=3)
@both_forms
@pytest.mark.parametrize("name", [*FORCED, "not allowed"])
async def test_an_answer_instead_of_a_forced_call_is_complete(harness: Line, name: str, stream: bool) -> None:
    harness.say(LOOKS, LOOKS, ANSWER)
    text, calls, reason, about = await forced(harness, name, stream=stream)
    assert (text, calls, about["unmet"]) == ("ok", [], UNMET)
    assert reason in ("stop", "end_turn")


BM25: Json = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
LATER: Json = {**LOOK, "defer_loading": True}


def uses(message: Json) -> list[str]:
    return [block["name"] for block in message["content"] if block["type"] == "tool_use"]


@both_forms
async def test_a_search_does_not_find_a_removed_tool(harness: Line, stream: bool) -> None:
    tools = [BM25, HEAR, LATER, {**LATER, "name": "look_twice"}]
    harness.say(called("tool_search_tool_bm25", '{"query":"look"}'), ANSWER)
    answer = await harness.gateway.messages(model="gpt-oss", tools=tools, messages=REMOVED, stream=stream)
    blocks = message_in(answer)["content"]
    [found] = [block["content"] for block in blocks if block["type"] == "tool_search_tool_result"]
    assert [reference["tool_name"] for reference in found["tool_references"]] == ["look_twice"]
    assert "type look =" not in harness.prompts[-1]


FUNCTION: Json = {"type": "function", "name": "hear", "parameters": SCHEMA}
DEFERRED: Json = {"type": "function", "name": "look", "description": "To look.", "parameters": SCHEMA} | {
    "defer_loading": True
}
SEARCH: Json = {"type": "tool_search"}
NOWHERE = called("print_tree", "{}")
INFORMED = "There is no tool 'print_tree'. Call one of these instead, or answer without: "


@both_forms
async def test_an_undeclared_tool_beside_a_search_is_no_call_of_a_server(harness: Line, stream: bool) -> None:
    harness.say(NOWHERE, ANSWER)
    response = await harness.responds(stream=stream, tools=[SEARCH, FUNCTION, DEFERRED])
    assert [item["type"] for item in response["output"]] == ["reasoning", "reasoning", "message"]
    assert "undeclared-tool" in response["unisono"]["recoveries"]
    # The deferred tool was not found yet.
    assert f"{INFORMED}hear, tool_search.<|end|>" in harness.prompts[-1]


@both_forms
async def test_the_model_reads_about_a_tool_that_it_found(harness: Line, stream: bool) -> None:
    harness.say(called("tool_search", '{"query":"look"}'), NOWHERE, LOOKS)
    response = await harness.responds(stream=stream, tools=[SEARCH, FUNCTION, DEFERRED])
    assert f"{INFORMED}hear, tool_search, look.<|end|>" in harness.prompts[-1]
    assert [item["name"] for item in response["output"] if item["type"] == "function_call"] == ["look"]


SEARCHES: dict[str, Json] = {"gateway": SEARCH, "client": {**SEARCH, "execution": "client"}}


@both_forms
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
async def test_a_call_of_a_deferred_tool_that_was_not_found_is_returned(
    harness: Line, search: Json, stream: bool
) -> None:
    harness.say(LOOKS)
    response = await harness.responds(stream=stream, tools=[search, FUNCTION, DEFERRED])
    assert "type look =" not in harness.prompts[0]
    assert [item["name"] for item in response["output"] if item["type"] == "function_call"] == ["look"]
    assert "undeclared-tool" not in response["unisono"]["recoveries"]


@both_forms
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
async def test_a_call_of_a_deferred_tool_of_an_item_is_returned(harness: Line, search: Json, stream: bool) -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [search, FUNCTION, DEFERRED]}
    harness.say(LOOKS, LOOKS)
    first = await harness.responds(stream=stream, input=[added, ASKED])
    output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "blue"}
    second = await harness.responds(stream=stream, input=[output], previous_response_id=first["id"])
    assert not [prompt for prompt in harness.prompts if "type look =" in prompt]
    for response in (first, second):
        assert [item["name"] for item in response["output"] if item["type"] == "function_call"] == ["look"]
        assert "undeclared-tool" not in response["unisono"]["recoveries"]


# A history that was cut after the result of the client's search.
CUT: list[Json] = [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t2", "name": "look", "input": {"at": "sea"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2", "content": "blue"}]},
]
QUESTIONS: dict[str, list[Json]] = {"cut": CUT, "new": [ASKED]}


@both_forms
@pytest.mark.parametrize("search", [BM25, HEAR], ids=["gateway", "client"])
@pytest.mark.parametrize("messages", QUESTIONS.values(), ids=QUESTIONS)
async def test_a_call_of_a_deferred_tool_is_returned_in_messages(
    harness: Line, messages: list[Json], search: Json, stream: bool
) -> None:
    harness.say(LOOKS)
    tools = [search, {**HEAR, "name": "taste"}, LATER]
    answer = await harness.gateway.messages(model="gpt-oss", tools=tools, messages=messages, stream=stream)
    assert "type look =" not in harness.prompts[0]
    assert uses(message_in(answer)) == ["look"]
