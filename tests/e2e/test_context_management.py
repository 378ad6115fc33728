"""Compaction before an answer, wanted by `context_management` of a Responses request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from websockets.asyncio.client import connect

from tests.api.responses.folding import TERMINAL, fold
from tests.e2e.responses import ANSWER, THOUGHT, TOOL, Json, Line, kinds, line, refusal, text_of
from tests.e2e.wires import WIRES

pytestmark = pytest.mark.asyncio(loop_scope="module")

SUMMARY = "They want tea; the pot is empty."
SUMMARIZED = f"{THOUGHT}<|channel|>final<|message|>{SUMMARY}<|return|>"
# More than the smallest threshold, in tokens.
POT = "The porcelain pot is empty. " * 400
HISTORY: list[Json] = [
    {"type": "message", "role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": "Is there tea?"},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"into":"porcelain"}'},
    {"type": "function_call_output", "call_id": "c1", "output": POT},
    {"type": "message", "role": "assistant", "content": "There is none in the porcelain."},
]
QUESTION: Json = {"type": "message", "role": "user", "content": "Then make some."}
FOLLOW_UP: Json = {"type": "message", "role": "user", "content": "And now?"}
COMPACT: Json = {"context_management": [{"type": "compaction", "compact_threshold": 1000}], "tools": [TOOL]}
REMOVED = ("porcelain", "Sum up our conversation", "Hm.")
KEPT = ("Be brief.", "Is there tea?", SUMMARY, "Then make some.")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with line(WIRES[request.param]) as running:
        yield running


def assert_replaced(prompt: str, *later: str) -> None:
    assert [text for text in REMOVED if text in prompt] == []
    texts = [*KEPT, *later]
    assert [prompt.count(text) for text in texts] == [1] * len(texts)
    assert sorted(texts, key=prompt.index) == texts


async def finished(harness: Line, response: Json) -> Json:
    while response["status"] in ("queued", "in_progress"):
        response = await harness.kept(response)
    return response


async def over_socket(harness: Line, *requests: Json) -> list[Json]:
    """Send requests over one socket, each continuing the one before, and return their responses."""
    responses: list[Json] = []
    async with connect(harness.gateway.url.replace("http", "ws", 1) + "/v1/responses") as socket:
        for fields in requests:
            past = {"previous_response_id": responses[-1]["id"]} if responses else {}
            await socket.send(json.dumps({"type": "response.create", "model": "gpt-oss", **past, **fields}))
            events = [json.loads(await socket.recv())]
            while events[-1]["type"] not in TERMINAL:
                events.append(json.loads(await socket.recv()))
            responses.append(fold(events).response)
    return responses


FORMS: dict[str, Json] = {
    "whole": {"stream": False},
    "stream": {"stream": True},
    "whole, not stored": {"stream": False, "store": False},
    "stream, not stored": {"stream": True, "store": False},
    "background": {"stream": False, "background": True},
    "background stream": {"stream": True, "background": True},
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
async def test_a_long_conversation_is_compacted_before_its_answer(harness: Line, form: Json) -> None:
    harness.say(SUMMARIZED, ANSWER)
    first = await finished(harness, await harness.responds(input=[*HISTORY, QUESTION], **COMPACT, **form))
    assert kinds(first["output"]) == ["compaction", "reasoning", "message"]
    assert text_of(first) == "ok"
    summarizing, answering = harness.prompts
    assert "Sum up our conversation" in summarizing
    assert_replaced(answering)
    # Both generations are counted.
    usage = first["usage"]
    if harness.wire.name == "vllm":
        assert usage["input_tokens"] == sum(map(len, harness.tokens))
    assert usage["input_tokens"] > 2_000
    assert usage["output_tokens"] > 15
    # The client sends everything again, or only what follows the compaction.
    for kept in ([*HISTORY, QUESTION], []):
        await harness.whole(input=[*kept, *first["output"], FOLLOW_UP], store=False, **COMPACT)
        assert_replaced(harness.prompts[-1], "<|message|>ok<|end|>", "And now?")
        assert harness.prompts[-1].startswith(answering.removesuffix("<|start|>assistant"))
    assert len(harness.prompts) == 4


async def test_the_stream_names_the_compaction_before_the_answer(harness: Line) -> None:
    harness.say(SUMMARIZED, ANSWER)
    streamed = await harness.streamed(input=[*HISTORY, QUESTION], **COMPACT)
    assert streamed.types[:6] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.compaction.compacting",
        "response.output_item.done",
        "response.output_item.added",
    ]
    assert SUMMARY.encode() not in streamed.answer.raw
    assert await harness.kept(streamed.last) == streamed.last


@pytest.mark.parametrize("kind", ["previous_response_id", "conversation"])
async def test_a_stored_conversation_continues_from_its_compaction(harness: Line, kind: str) -> None:
    harness.say(ANSWER, SUMMARIZED, ANSWER)
    past: Json = {"conversation": await harness.conversation()} if kind == "conversation" else {}
    first = await harness.whole(input=HISTORY, **past)
    for question in (QUESTION, FOLLOW_UP):
        past = past if kind == "conversation" else {"previous_response_id": first["id"]}
        first = await harness.whole(input=[question], **past, **COMPACT)
        assert ("compaction" in kinds(first["output"])) is (question is QUESTION)
    assert_replaced(harness.prompts[-1], "And now?")
    await harness.whole(
        input="Once more?", **(past if kind == "conversation" else {"previous_response_id": first["id"]})
    )
    assert_replaced(harness.prompts[-1], "And now?", "Once more?")


@pytest.mark.parametrize("store", [False, True], ids=["not stored", "stored"])
async def test_a_socket_continues_from_a_compaction(harness: Line, store: bool) -> None:
    harness.say(SUMMARIZED, ANSWER)
    fields: Json = {**COMPACT, "store": store}
    first, _ = await over_socket(harness, {"input": [*HISTORY, QUESTION], **fields}, {"input": [FOLLOW_UP], **fields})
    assert kinds(first["output"]) == ["compaction", "reasoning", "message"]
    assert_replaced(harness.prompts[-1], "And now?")
    assert len(harness.prompts) == 3


async def test_a_loop_of_calls_is_compacted_too(harness: Line) -> None:
    harness.say(SUMMARIZED, ANSWER)
    # The model has not answered the last result yet.
    call = {"type": "function_call", "call_id": "c2", "name": "look", "arguments": '{"into":"cup"}'}
    result = {"type": "function_call_output", "call_id": "c2", "output": "The cup is full."}
    await harness.whole(input=[*HISTORY[:4], call, result], **COMPACT)
    prompt = harness.prompts[-1]
    assert "porcelain" not in prompt
    kept = ["Is there tea?", SUMMARY, '{"into":"cup"}', "<|start|>functions.look to", "The cup is full."]
    assert [prompt.count(text) for text in kept] == [1] * len(kept)
    assert sorted(kept, key=prompt.index) == kept


async def test_a_result_follows_the_compaction_of_a_continued_response(harness: Line) -> None:
    look = f'{THOUGHT}<|channel|>commentary to=functions.look <|constrain|>json<|message|>{{"into":"cup"}}<|call|>'
    harness.say(look, SUMMARIZED, ANSWER)
    first = await harness.whole(input=[*HISTORY, QUESTION], tools=[TOOL])
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "The cup is full."}
    second = await harness.whole(input=[result], previous_response_id=first["id"], **COMPACT)
    assert kinds(second["output"]) == ["compaction", "reasoning", "message"]
    kept = [*KEPT[:2], KEPT[3], SUMMARY, "<|channel|>analysis", '{"into":"cup"}', "The cup is full."]
    for more in ([], [FOLLOW_UP]):
        if more:
            await harness.whole(input=more, previous_response_id=second["id"], tools=[TOOL])
        prompt = harness.prompts[-1]
        texts = [text for text in kept if text != "<|channel|>analysis" or not more]
        assert "porcelain" not in prompt
        assert [prompt.count(text) for text in texts] == [1] * len(texts)
        assert sorted(texts, key=prompt.index) == texts


@pytest.mark.parametrize("kind", ["previous_response_id", "conversation", "items"])
async def test_a_compaction_without_user_messages_replaces_the_conversation(harness: Line, kind: str) -> None:
    look = f'{THOUGHT}<|channel|>commentary to=functions.look <|constrain|>json<|message|>{{"into":"cup"}}<|call|>'
    harness.say(look, SUMMARIZED, ANSWER)
    past: Json = {"conversation": await harness.conversation()} if kind == "conversation" else {}
    history: list[Json] = []
    # The message is longer than the room for user messages in the compaction.
    inputs: list[Json] = [{"role": "user", "content": POT}, {"type": "function_call_output", "output": "It is full."}]
    for newest in (*inputs, FOLLOW_UP):
        if newest.get("output"):
            newest = {**newest, "call_id": history[-1]["call_id"]}
        history.append(newest)
        sent = history if kind == "items" else [newest]
        fields = {"tools": [TOOL]} if newest is FOLLOW_UP else COMPACT
        response = await harness.whole(input=sent, **past, **fields)
        past = {kind: response["id"]} if kind == "previous_response_id" else past
        history += response["output"]
    assert kinds(response["output"]) == ["reasoning", "message"]
    prompt = harness.prompts[-1]
    assert "porcelain" not in prompt
    kept = [SUMMARY, '{"into":"cup"}', "It is full.", "<|message|>ok<|end|>", "And now?"]
    assert [prompt.count(text) for text in kept] == [1] * len(kept)
    assert sorted(kept, key=prompt.index) == kept


UNCHANGED: dict[str, Json] = {
    "below the threshold": {"input": [HISTORY[1], HISTORY[4], QUESTION]},
    "nothing but one long message": {"input": POT},
}


@pytest.mark.parametrize("fields", UNCHANGED.values(), ids=UNCHANGED)
async def test_other_conversations_are_not_compacted(harness: Line, fields: Json) -> None:
    harness.say(ANSWER)
    plain = await harness.whole(**fields)
    managed = await harness.whole(**fields, context_management=COMPACT["context_management"])
    assert kinds(managed["output"]) == kinds(plain["output"])
    assert harness.prompts[0] == harness.prompts[1]
    assert "notes" not in managed["unisono"]


@pytest.mark.parametrize("is_cut", [False, True], ids=["missing", "cut off"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_incomplete_summary_leaves_the_conversation_as_it_is(
    harness: Line, stream: bool, is_cut: bool
) -> None:
    missing, cut = (f"{THOUGHT}<|channel|>final<|message|>{text}" for text in ("<|return|>", SUMMARY))
    summary = harness.wire.script(cut, finish="length") if is_cut else missing
    harness.say(summary, ANSWER)
    response = await harness.responds(input=[*HISTORY, QUESTION], stream=stream, **COMPACT)
    assert kinds(response["output"]) == ["reasoning", "message"]
    assert "porcelain" in harness.prompts[-1]
    assert "Sum up our conversation" not in harness.prompts[-1]
    [note] = response["unisono"]["notes"]
    assert note == "compaction: the model wrote no complete summary, so the conversation was not compacted"


INVALID: dict[str, tuple[Any, str]] = {
    "not a list": ({"type": "compaction"}, "context_management"),
    "unknown type": ([{"type": "forget"}], "context_management.0.type"),
    "no type": ([{"compact_threshold": 2000}], "context_management.0.type"),
    "threshold too small": (
        [{"type": "compaction", "compact_threshold": 999}],
        "context_management.0.compact_threshold",
    ),
    "threshold as text": (
        [{"type": "compaction", "compact_threshold": "2000"}],
        "context_management.0.compact_threshold",
    ),
}


@pytest.mark.parametrize(("value", "param"), INVALID.values(), ids=INVALID)
async def test_an_invalid_entry_is_refused_by_name(harness: Line, value: Any, param: str) -> None:
    assert param in refusal(await harness.post(context_management=value), 400, param)
