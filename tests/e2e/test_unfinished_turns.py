"""Turns that end too early and calls of undeclared tools, on every API surface and both kinds of wire."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.gateway import Answer
from tests.e2e.responses import Line, line
from tests.e2e.surfaces import unisono_object
from tests.e2e.wires import WIRES

Json = dict[str, Any]
SCHEMA: Json = {"type": "object", "properties": {"at": {"type": "string"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
TOOLS = [{"type": "function", "name": "look", "parameters": SCHEMA}]
MESSAGES_TOOLS = [{"name": "look", "input_schema": SCHEMA}]

PREAMBLE = "<|channel|>commentary<|message|>I will now look.<|return|>"
LOOK = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"sky"}<|call|>'
UNKNOWN = '<|channel|>commentary to=functions.print_tree <|constrain|>json<|message|>{"path":"."}<|call|>'
FOREIGN = '<|channel|>commentary to=repo_browser.print_tree <|constrain|>json<|message|>{"path":""}<|call|>'
SURFACES = ("chat", "responses", "messages")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "mlx_server"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with line(WIRES[request.param]) as running:
        yield running


async def send(harness: Line, surface: str, *, stream: bool) -> Answer:
    question = [{"role": "user", "content": "Hi"}]
    if surface == "responses":
        return await harness.post(input=question, tools=TOOLS, stream=stream)
    if surface == "chat":
        fields: Json = {"stream_options": {"include_usage": True}} if stream else {}
        return await harness.gateway.chat(model="gpt-oss", messages=question, tools=CHAT_TOOLS, stream=stream, **fields)
    return await harness.gateway.messages(model="gpt-oss", messages=question, tools=MESSAGES_TOOLS, stream=stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_preamble_is_followed_by_the_call_that_it_announces(harness: Line, surface: str, stream: bool) -> None:
    harness.say(PREAMBLE, LOOK)
    answer = await send(harness, surface, stream=stream)
    assert "dangling-preamble" in unisono_object(answer)["recoveries"]
    assert "I will now look." in whole_text(answer)
    assert "sky" in whole_text(answer)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("output", [UNKNOWN, FOREIGN], ids=["functions", "another namespace"])
@pytest.mark.asyncio(loop_scope="module")
async def test_an_undeclared_tool_is_replaced_by_a_declared_one(
    harness: Line, output: str, surface: str, stream: bool
) -> None:
    harness.say(output, LOOK)
    answer = await send(harness, surface, stream=stream)
    assert "undeclared-tool" in unisono_object(answer)["recoveries"]
    assert "print_tree" not in whole_text(answer)
    assert "sky" in whole_text(answer)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_repeated_call_of_an_undeclared_tool_is_returned_as_text(
    harness: Line, surface: str, stream: bool
) -> None:
    harness.say(FOREIGN)
    answer = await send(harness, surface, stream=stream)
    about = unisono_object(answer)
    assert [note for note in about["notes"] if "does not declare" in note]
    assert 'repo_browser.print_tree({"path":""})' in whole_text(answer)


REMOVAL: Json = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}
ADDITION: Json = {**REMOVAL, "type": "tool_addition"}
HEAR: Json = {"name": "hear", "input_schema": SCHEMA}
HEARING = LOOK.replace("functions.look", "functions.hear").replace("sky", "sea")
# A search that the gateway runs, with a tool to find.
SEARCHED: list[Json] = [
    {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"},
    {"name": "taste", "input_schema": SCHEMA, "defer_loading": True},
]
DEFINITION: Json = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": MESSAGES_TOOLS[0]}}
# Changes of tools, further tools, and whether the model must not call the tool.
CHANGES: dict[str, tuple[list[Json], list[Json], bool]] = {
    "removed": ([REMOVAL], [], True),
    "removed beside tools of the gateway": ([REMOVAL], SEARCHED, True),
    "removed again": ([REMOVAL, ADDITION, REMOVAL], [], True),
    "added again": ([REMOVAL, ADDITION], [], False),
    "defined again": ([REMOVAL, DEFINITION], [], False),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("changes", "more", "is_removed"), CHANGES.values(), ids=CHANGES)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_removed_tool_is_replaced_by_a_declared_one(
    harness: Line, changes: list[Json], more: list[Json], is_removed: bool, stream: bool
) -> None:
    harness.say(LOOK, HEARING)
    before = len(harness.prompts)
    answer = await harness.gateway.messages(
        model="gpt-oss",
        messages=[{"role": "user", "content": "Hi"}, {"role": "system", "content": changes}],
        tools=[*MESSAGES_TOOLS, HEAR, *more],
        stream=stream,
    )
    assert ("undeclared-tool" in unisono_object(answer).get("recoveries", [])) == is_removed
    assert ("sea" if is_removed else "sky") in whole_text(answer)
    assert ("There is no tool 'look'. Call one of these instead" in harness.prompts[-1]) == is_removed
    # The declaration stays, so that cached prompts stay valid.
    assert all("type look = " in prompt for prompt in harness.prompts[before:])


def whole_text(answer: Answer) -> str:
    """Return all strings of an answer, streamed or not, joined in their order."""
    texts: list[str] = []

    def search(value: Any) -> None:
        if isinstance(value, str):
            texts.append(value)
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            search(inner)

    if not answer.events:
        search(answer.body)
        return " ".join(texts)
    for event in answer.events:
        delta = event.get("delta")
        for choice in event.get("choices", ()):
            search(choice["delta"])
        search(delta if event.get("type") != "response.completed" else None)
    return "".join(texts).replace("text_delta", "") + json.dumps([event.get("item") for event in answer.events])
