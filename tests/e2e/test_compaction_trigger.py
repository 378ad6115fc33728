"""Compaction that a client requests with a `compaction_trigger` item at the end of its input."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.responses import ANSWER, CALL, THOUGHT, TOOL, Line, line
from tests.e2e.wires import WIRES

Json = dict[str, Any]
SUMMARY = "They want tea; the pot is empty."
SUMMARIZED = f"{THOUGHT}<|channel|>final<|message|>{SUMMARY}<|return|>"
TRIGGER = {"type": "compaction_trigger"}
HISTORY: list[Json] = [
    {"type": "message", "role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": "Is there tea?"},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"into":"porcelain"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "The porcelain pot is empty."},
    {"type": "message", "role": "assistant", "content": "There is none in the porcelain."},
]
FOLLOW_UP = {"type": "message", "role": "user", "content": "Then make some."}
REMOVED = ("porcelain", "Sum up our conversation", "Hm.")
KEPT = ("Be brief.", "Is there tea?", SUMMARY, "Then make some.")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with line(WIRES[request.param]) as running:
        yield running


def assert_replaced(prompt: str) -> None:
    assert [text for text in REMOVED if text in prompt] == []
    assert [prompt.count(text) for text in KEPT] == [1] * len(KEPT)
    assert sorted(KEPT, key=prompt.index) == list(KEPT)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.asyncio(loop_scope="module")
async def test_the_answer_is_one_compaction_item(harness: Line, stream: bool) -> None:
    harness.say(SUMMARIZED, ANSWER)
    form = {"format": {"type": "json_object"}}
    compacted = await harness.responds(
        input=[*HISTORY, TRIGGER], tools=[TOOL], tool_choice="required", text=form, stream=stream, store=False
    )
    [item] = compacted["output"]
    assert (item["type"], compacted["status"]) == ("compaction", "completed")
    assert compacted["usage"]["output_tokens"] > 0
    assert "The porcelain pot is empty." in harness.prompts[0]
    # The client sends the trigger again, with its answer behind it. Codex also keeps its own messages before it.
    for kept in ([TRIGGER], HISTORY[:2]):
        await harness.responds(input=[*kept, item, FOLLOW_UP], tools=[TOOL], stream=stream, store=False)
        assert_replaced(harness.prompts[-1])


@pytest.mark.asyncio(loop_scope="module")
async def test_the_count_is_that_of_the_request_for_the_summary(harness: Line) -> None:
    harness.say(SUMMARIZED)
    fields: Json = {"input": [*HISTORY, TRIGGER], "tools": [TOOL]}
    counted = await harness.post("/input_tokens", **fields)
    compacted = await harness.whole(**fields, store=False)
    assert counted.body["input_tokens"] == compacted["usage"]["input_tokens"]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_stream_names_the_compaction(harness: Line) -> None:
    harness.say(SUMMARIZED)
    streamed = await harness.streamed(input=[*HISTORY, TRIGGER])
    assert streamed.types == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.compaction.compacting",
        "response.output_item.done",
        "response.completed",
    ]
    assert SUMMARY.encode() not in streamed.answer.raw


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_stored_compaction_replaces_the_chain_before_it(harness: Line, background: bool) -> None:
    harness.say(CALL, SUMMARIZED, ANSWER, ANSWER)
    first = await harness.whole(input=HISTORY[:2], tools=[TOOL])
    [call] = [item for item in first["output"] if item["type"] == "function_call"]
    result = {**HISTORY[3], "call_id": call["call_id"]}
    compacted = await harness.whole(
        input=[result, TRIGGER], previous_response_id=first["id"], tools=[TOOL], background=background
    )
    while compacted["status"] in ("queued", "in_progress"):
        compacted = (await harness.get(f"/responses/{compacted['id']}")).body
    assert [item["type"] for item in compacted["output"]] == ["compaction"]
    last = await harness.whole(input=[FOLLOW_UP], previous_response_id=compacted["id"], tools=[TOOL])
    # The model has not answered the result of its call yet.
    kept, prompt = (
        [*KEPT[:3], "<|start|>functions.look to", "The porcelain pot is empty.", KEPT[3]],
        harness.prompts[-1],
    )
    assert [prompt.count(text) for text in kept] == [1] * len(kept)
    assert sorted(kept, key=prompt.index) == kept
    await harness.whole(input="And now?", previous_response_id=last["id"], tools=[TOOL])
    assert harness.prompts[-1].count(SUMMARY) == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_compaction_without_a_summary_keeps_the_conversation(harness: Line) -> None:
    harness.say("<|channel|>analysis<|message|>Nothing to say.<|end|>", ANSWER)
    compacted = await harness.whole(input=[*HISTORY, TRIGGER], store=False, unisono={"recoveries": {}})
    [item] = compacted["output"]
    harness.say(ANSWER)
    await harness.whole(input=[item, FOLLOW_UP], store=False)
    assert "Is there tea?" in harness.prompts[-1]
    assert "Then make some." in harness.prompts[-1]
