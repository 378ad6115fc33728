"""Compaction of conversations that are too long for the request for their summary."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from string import ascii_letters, digits
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.gateway import gateway
from tests.e2e.messages import message_in
from tests.e2e.responses import ANSWER, THOUGHT, TOOL, Line
from tests.e2e.wires import WIRES, deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
WINDOW = 8_000
SUMMARY = "They want tea; the pot is empty."
SUMMARIZED = f"{THOUGHT}<|channel|>final<|message|>{SUMMARY}<|return|>"
TASK = "Find the pot."
EARLIER = ("Is there coffee?", "There is none.")
CALLS = 20
WORDS = "porcelain " * 400
NOTE = "items, because the conversation exceeds the context window"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[Line]:
    wire = WIRES["vllm"]
    async with (
        wire.fake(context=WINDOW) as fake,
        gateway({"model_list": [deployment("gpt-oss", wire, fake)]}) as running,
    ):
        yield Line(wire, fake, running)


def outputs(words: str = WORDS) -> list[str]:
    return [*(f"Finding {n}. {WORDS}" for n in range(CALLS - 1)), f"Finding {CALLS - 1}. {words}The end."]


def items(words: str = WORDS) -> list[Json]:
    found: list[Json] = [
        {"role": "user", "content": EARLIER[0]},
        {"role": "assistant", "content": EARLIER[1]},
        {"role": "user", "content": TASK},
    ]
    for n, output in enumerate(outputs(words)):
        found += [
            {"type": "function_call", "call_id": f"c{n}", "name": "look", "arguments": f'{{"at":{n}}}'},
            {"type": "function_call_output", "call_id": f"c{n}", "output": output},
        ]
    return found


def messages(words: str = WORDS) -> list[Json]:
    found: list[Json] = [
        {"role": "user", "content": EARLIER[0]},
        {"role": "assistant", "content": EARLIER[1]},
        {"role": "user", "content": TASK},
    ]
    for n, output in enumerate(outputs(words)):
        use = {"type": "tool_use", "id": f"c{n}", "name": "look", "input": {"at": n}}
        result = {"type": "tool_result", "tool_use_id": f"c{n}", "content": output}
        found += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return found


async def message(harness: Line, words: str, **fields: Any) -> Json:
    tools = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
    body = {"model": "gpt-oss", "max_tokens": 500, "messages": messages(words), "tools": tools, **fields}
    return message_in(await harness.gateway.post("/v1/messages", json.dumps(body).encode()))


async def on_demand(harness: Line, words: str) -> Json:
    answer = await harness.post("/compact", input=items(words), tools=[TOOL])
    assert answer.status == 200, answer.raw
    return dict(answer.body)


async def by_trigger(harness: Line, words: str) -> Json:
    return await harness.whole(input=[*items(words), {"type": "compaction_trigger"}], tools=[TOOL], store=False)


def before_the_answer(*, stream: bool) -> Callable[[Line, str], Awaitable[Json]]:
    async def responds(harness: Line, words: str) -> Json:
        management = [{"type": "compaction"}]
        return await harness.responds(input=items(words), tools=[TOOL], context_management=management, stream=stream)

    return responds


def by_edit(*, stream: bool) -> Callable[[Line, str], Awaitable[Json]]:
    async def answers(harness: Line, words: str) -> Json:
        edits = {"edits": [{"type": "compact_20260112"}]}
        return await message(harness, words, context_management=edits, stream=stream)

    return answers


async def on_demand_of_messages(harness: Line, words: str) -> Json:
    return await message(harness, words, compaction={"type": "summarize"})


WAYS: dict[str, Callable[[Line, str], Awaitable[Json]]] = {
    "compact": on_demand,
    "compaction_trigger": by_trigger,
    "context_management": before_the_answer(stream=False),
    "context_management, streamed": before_the_answer(stream=True),
    "Messages edit": by_edit(stream=False),
    "Messages edit, streamed": by_edit(stream=True),
    "Messages on demand": on_demand_of_messages,
}
all_ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@all_ways
async def test_only_the_oldest_items_are_missing_from_the_summary(
    harness: Line, way: Callable[[Line, str], Awaitable[Json]]
) -> None:
    harness.say(SUMMARIZED, ANSWER)
    answer = await way(harness, WORDS)
    prompt = harness.prompts[0]
    assert "Sum up our conversation" in prompt
    assert TASK in prompt
    assert not any(text in prompt for text in EARLIER)
    findings = [n for n in range(CALLS) if f"Finding {n}. " in prompt]
    assert findings == [n for n in range(CALLS) if f'{{"at":{n}}}' in prompt] == list(range(findings[0], CALLS))
    # One more call with its output, of about 430 tokens, would exceed the window.
    assert WINDOW * 3 // 4 - 430 < len(harness.tokens[0]) <= WINDOW * 3 // 4
    left_out = 2 + 2 * findings[0]
    assert answer["unisono"]["left_out"] == left_out
    assert [note for note in answer["unisono"]["notes"] if "compaction" in note] == [
        f"compaction: the summary does not cover the {left_out} oldest {NOTE}"
    ]


@all_ways
async def test_an_output_beyond_the_window_is_read_without_its_middle(
    harness: Line, way: Callable[[Line, str], Awaitable[Json]]
) -> None:
    harness.say(SUMMARIZED, ANSWER)
    answer = await way(harness, "word " * 20_000)
    prompt = harness.prompts[0]
    assert TASK in prompt
    assert [prompt.count(text) for text in (f"Finding {CALLS - 1}.", "[The middle of this text", "The end.")] == [1] * 3
    assert "Finding 0." not in prompt
    assert prompt.count("word ") > WINDOW // 2
    # The items before the newest call, except the task.
    assert answer["unisono"]["left_out"] == 2 + 2 * (CALLS - 1)
    [_, shortened] = answer["unisono"]["notes"]
    assert shortened.startswith("compaction: the model read 1 text without its middle")


def call_with(output: str) -> list[Json]:
    return [
        {"role": "user", "content": TASK},
        {"type": "function_call", "call_id": "c0", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c0", "output": output},
    ]


# Outputs of more than 14,400 characters are left out at once. Shorter texts can still exceed the window.
DENSE = "".join(Random(1).choices(ascii_letters + digits, k=14_000))
LONG: dict[str, list[Json]] = {
    "an output": call_with("word " * 6_000),
    "a dense output": call_with(DENSE),
    "rare characters": call_with("𝕏𝖆" * 2_000),
    "a message": [
        {"role": "user", "content": "word " * 7_400},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": TASK},
    ],
    "dense messages": [
        {"role": "user", "content": DENSE[:7_000]},
        {"role": "user", "content": DENSE[7_000:]},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": TASK},
    ],
}


@pytest.mark.parametrize("way", ["compact", "compaction_trigger", "context_management"])
@pytest.mark.parametrize("kind", LONG)
async def test_a_compacted_conversation_fits_the_window(harness: Line, kind: str, way: str) -> None:
    harness.say(SUMMARIZED, ANSWER)
    if way == "context_management":
        compacted = await harness.whole(input=LONG[kind], tools=[TOOL], context_management=[{"type": "compaction"}])
        assert [item["type"] for item in compacted["output"]][:1] == ["compaction"]
    elif way == "compact":
        compacted = (await harness.post("/compact", input=LONG[kind], tools=[TOOL])).body
    else:
        compacted = await harness.whole(input=[*LONG[kind], {"type": "compaction_trigger"}], tools=[TOOL], store=False)
    question = {"role": "user", "content": "Go on."}
    await harness.whole(input=[*compacted["output"], question], tools=[TOOL], store=False)
    assert SUMMARY in harness.prompts[-1]
    assert len(harness.tokens[-1]) < WINDOW * 9 // 10


async def test_a_summary_is_summarized_again(harness: Line) -> None:
    harness.say(SUMMARIZED, ANSWER)
    first = await harness.whole(input=items(), tools=[TOOL], context_management=[{"type": "compaction"}])
    assert first["output"][0]["type"] == "compaction"
    harness.say(SUMMARIZED.replace("empty", "full"), ANSWER)
    await harness.whole(input=[*first["output"], *items()[3:], {"type": "compaction_trigger"}], tools=[TOOL])
    # The summary and the task are older than the calls that were dropped.
    assert [harness.prompts[0].count(text) for text in (TASK, SUMMARY, "Finding 0.")] == [1, 1, 0]
    assert "Finding 19." in harness.prompts[0]


async def test_truncation_keeps_the_task_of_a_long_turn(harness: Line) -> None:
    harness.say(ANSWER)
    response = await harness.whole(input=items(), tools=[TOOL], truncation="auto")
    prompt = harness.prompts[0]
    findings = [n for n in range(CALLS) if f"Finding {n}. " in prompt]
    assert findings == list(range(findings[0], CALLS))
    assert TASK in prompt
    assert response["unisono"]["left_out"] == 2 + 2 * findings[0]
