"""Tools that a client adds during a conversation: the model sees them where they were found, and not before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.responses import ANSWER, THOUGHT, Line, line, refusal
from tests.e2e.surfaces import unisono_object
from tests.e2e.wires import ENCODING, WIRES

Json = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
LOOK = {"type": "function", "name": "look", "description": "Look up.", "parameters": SCHEMA, "defer_loading": True}
STARS = {"type": "namespace", "name": "stars", "description": "Stars.", "tools": [LOOK]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Find tools.", "parameters": SCHEMA}
ASKED = {"type": "message", "role": "user", "content": "Which star is this?"}


def called(name: str, arguments: str) -> str:
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{THOUGHT}{header}{arguments}<|call|>"


SEARCHES = called("tool_search", '{"at": "sky"}')
LOOKS = called("stars__look", '{"at":"north"}')


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with line(WIRES[request.param]) as running:
        yield running


BAD: Json = {**LOOK, "parameters": {"type": "object", "properties": {"a": 5}}, "defer_loading": False}
BAD_STARS: Json = {**STARS, "tools": [LOOK, BAD | {"name": "bad"}]}
# Faults that are found only when the prompt is rendered.
FAULTS: dict[str, tuple[Json, str]] = {
    "tools": ({"tools": [{"type": "web_search"}, BAD]}, "tools.1.parameters"),
    "a namespace": ({"tools": [STARS, SEARCH, BAD_STARS | {"name": "suns"}]}, "tools.2.tools.1.parameters"),
    "additional_tools": (
        {"input": [ASKED, {"type": "additional_tools", "role": "developer", "tools": [LOOK | {"name": "see"}, BAD]}]},
        "input.1.tools.1.parameters",
    ),
    "tool_search_output": (
        {
            "input": [
                ASKED,
                {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {}},
                {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [BAD_STARS]},
            ]
        },
        "input.2.tools.0.tools.1.parameters",
    ),
}


@pytest.mark.parametrize(("fields", "param"), FAULTS.values(), ids=FAULTS)
@pytest.mark.asyncio(loop_scope="module")
async def test_an_error_names_the_field_of_the_declaration(harness: Line, fields: Json, param: str) -> None:
    message = refusal(await harness.post(**{"input": [ASKED], **fields}), 400, param)
    assert message.startswith(f"'{param}': a tool's parameters cannot be used: ")


def is_extended(harness: Line) -> bool:
    """Return whether the last prompt begins with the prompt before it and the answer to that prompt."""
    prompts = [ENCODING.encode_marked(prompt) for prompt in harness.prompts[-2:]]
    return prompts[1][: len(prompts[0])] == prompts[0]


@pytest.mark.parametrize("stored", [False, True], ids=["resent", "stored"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_tool_that_the_client_finds_is_called(harness: Line, stream: bool, stored: bool) -> None:
    fields: Json = {"tools": [SEARCH, STARS], "stream": stream, "store": stored}
    harness.say(SEARCHES, LOOKS, ANSWER)
    first = await harness.responds(input=[ASKED], **fields)
    assert "stars" not in harness.prompts[0].replace(ASKED["content"], "")
    [search] = [item for item in first["output"] if item["type"] == "tool_search_call"]
    assert (search["execution"], search["arguments"]) == ("client", {"at": "sky"})
    found = {"type": "tool_search_output", "call_id": search["call_id"], "execution": "client", "tools": [STARS]}

    def following(response: Json, given: list[Json], new: Json) -> Json:
        if stored:
            return {"previous_response_id": response["id"], "input": [new]}
        return {"input": [*given, *response["output"], new]}

    next_fields = following(first, [ASKED], found)
    second = await harness.responds(**next_fields, **fields)
    assert is_extended(harness)
    assert harness.prompts[1].count("type look") == 0
    assert harness.prompts[1].count("type stars__look = (_: {") == 1
    [look] = [item for item in second["output"] if item["type"] == "function_call"]
    assert (look["namespace"], look["name"], look["arguments"]) == ("stars", "look", '{"at":"north"}')
    result = {"type": "function_call_output", "call_id": look["call_id"], "output": "Polaris"}
    third = await harness.responds(**following(second, next_fields["input"], result), **fields)
    assert is_extended(harness)
    assert harness.prompts[2].count("type stars__look = (_: {") == 1
    assert third["output"][-1]["content"][0]["text"] == "ok"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.asyncio(loop_scope="module")
async def test_tools_in_an_item_are_called_like_declared_ones(harness: Line, stream: bool) -> None:
    shell = {"type": "custom", "name": "exec", "description": "Run.", "format": {"type": "text"}}
    tools = [{"type": "namespace", "name": "functions", "tools": [shell]}, STARS]
    item = {"type": "additional_tools", "role": "developer", "tools": tools}
    harness.say(called("exec", '{"input": "ls"}'))
    response = await harness.responds(input=[item, ASKED], tools=[], stream=stream)
    assert "# Valid channels: analysis, commentary, final." in harness.prompts[0]
    assert "type exec = (_: string) => any;" in harness.prompts[0]
    [call] = [entry for entry in response["output"] if entry["type"] == "custom_tool_call"]
    assert (call["name"], call["input"]) == ("exec", "ls")
    [note] = response["unisono"]["notes"]
    assert note.startswith("input.0.tools.1.tools.0.defer_loading: no effect")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_referenced_tool_is_declared_in_messages(harness: Line, stream: bool) -> None:
    find = {"name": "ToolSearch", "description": "Find tools.", "input_schema": SCHEMA}
    look = {"name": "look", "description": "Look up.", "input_schema": SCHEMA, "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "look"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [reference]}
    fields: Json = {"model": "gpt-oss", "tools": [find, look], "stream": stream}
    harness.say(called("ToolSearch", '{"at":"sky"}'), called("look", '{"at":"north"}'))
    asked = {"role": "user", "content": "Which star?"}
    await harness.gateway.messages(messages=[asked], **fields)
    use = {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {"at": "sky"}}
    history = [asked, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    answer = await harness.gateway.messages(messages=history, **fields)
    first, second = harness.prompts
    assert "type look" not in first
    assert first.split("Which star?")[0] == second.split("Which star?")[0]
    assert "Found: look<|end|><|start|>developer<|message|># Tools" in second
    assert second.count("type look = (_: {") == 1
    assert b'"look"' in answer.raw
    assert "notes" not in unisono_object(answer)


# Tools of a request whose deferred tools cannot be found, so that they are declared from the start.
NOT_DEFERRED: dict[str, Json] = {
    "a search of the server whose name is taken": {
        "tools": [
            {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"},
            {"name": "tool_search_tool_bm25", "input_schema": SCHEMA},
        ]
    },
    "no other tool": {},
    "a required tool": {
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "look"},
    },
}


@pytest.mark.parametrize("fields", NOT_DEFERRED.values(), ids=NOT_DEFERRED)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_tool_that_cannot_be_found_is_declared_in_messages(harness: Line, fields: Json) -> None:
    look = {"name": "look", "input_schema": SCHEMA, "defer_loading": True}
    harness.say(called("look", '{"at":"north"}'))
    tools = [*fields.get("tools", ()), look]
    answer = await harness.gateway.messages(
        model="gpt-oss", messages=[{"role": "user", "content": "Hi"}], **{**fields, "tools": tools}
    )
    assert answer.status == 200
    assert "type look = (_: {" in harness.prompts[0]
