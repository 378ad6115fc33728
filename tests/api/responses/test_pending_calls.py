"""Calls without an output in a compaction, and the outputs that follow it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.responses.sockets import scripted_gateway
from tests.api.responses.test_compaction import (
    ANSWER,
    CONVERSATION,
    SUMMARY,
    SUMMARY_SCRIPT,
    TOOLS,
    compact,
    items_of_request,
)
from tests.api.scripted import Step, call, finished, reasoning
from unisono.core.conversation import AssistantCall, Item, ToolResult, UserMessage

OUTPUTS = [{"type": "function_call_output", "call_id": f"c{n}", "output": f"Output {n}."} for n in (2, 3)]
PENDING: list[Item] = [
    AssistantCall("c2", "look", '{"into":"cup"}'),
    ToolResult("c2", "look", "Output 2."),
    AssistantCall("c3", "taste", "tea"),
    ToolResult("c3", "taste", "Output 3."),
]


@pytest.mark.parametrize("way", ["compact", "compaction_trigger", "stored", "with newer input"])
async def test_calls_without_an_output_stay_after_the_summary(way: str) -> None:
    calls = [
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": '{"into":"cup"}'},
        {"type": "custom_tool_call", "call_id": "c3", "name": "taste", "input": "tea"},
    ]
    history = [*CONVERSATION, *calls]
    outputs = [*OUTPUTS[:1], {**OUTPUTS[1], "type": "custom_tool_call_output"}]
    async with scripted_gateway(SUMMARY_SCRIPT, ANSWER) as gateway:
        past: dict[str, Any] = {}
        if way in ("compact", "with newer input"):
            newer = [{"role": "user", "content": "Hurry."}] if way == "with newer input" else []
            output = (await compact(gateway, input=[*history, *newer])).json()["output"]
        else:
            body = {"model": "gpt-oss", "input": [*history, {"type": "compaction_trigger"}]}
            response = (await gateway.post("/v1/responses", body)).json()
            output = response["output"]
            if way == "stored":
                past, output = {"previous_response_id": response["id"]}, []
        answer = await gateway.post("/v1/responses", {"model": "gpt-oss", "input": [*output, *outputs], **past})
        assert answer.status == 200
        assert "notes" not in answer.json()["unisono"]
        *_, summary = items_of_request(gateway)[:-4]
        assert isinstance(summary, UserMessage)
        assert summary.text.endswith(SUMMARY)
        assert items_of_request(gateway)[-4:] == PENDING


async def test_reasoning_stays_with_a_call_without_an_output() -> None:
    called: list[Step] = [[*reasoning(0, "Into the cup."), *call(1, 0, "look", "{}"), finished()]]
    async with scripted_gateway(called, SUMMARY_SCRIPT, ANSWER) as gateway:
        first = (await gateway.post("/v1/responses", {"model": "gpt-oss", "input": "Tea?", "tools": TOOLS})).json()
        output = (await compact(gateway, input=None, previous_response_id=first["id"])).json()["output"]
        result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "Empty."}
        await gateway.post("/v1/responses", {"model": "gpt-oss", "input": [*output, result]})
        kinds = [type(item).__name__ for item in items_of_request(gateway)]
        assert kinds == ["UserMessage", "UserMessage", "AssistantReasoning", "AssistantCall", "ToolResult"]


THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Into the cup."}]}
PREAMBLE = {"role": "assistant", "phase": "commentary", "content": "I look."}
CALLS = [{"type": "function_call", "call_id": f"c{n}", "name": "look", "arguments": "{}"} for n in (2, 3)]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([THOUGHT, PREAMBLE, CALLS[1]], ["Into the cup.", "I look.", "c3"]),
        ([THOUGHT, *CALLS, OUTPUTS[0]], ["Into the cup.", "c2", "c2", "c3"]),
        ([THOUGHT, CALLS[0], OUTPUTS[0], PREAMBLE, CALLS[1]], ["I look.", "c3"]),
        ([THOUGHT, {"role": "assistant", "content": "Done."}, CALLS[1]], ["c3"]),
    ],
    ids=["preamble", "parallel calls", "next step", "after an answer"],
)
@pytest.mark.parametrize("way", ["compact", "compaction_trigger"])
async def test_reasoning_and_preamble_stay_with_their_call(
    items: list[dict[str, Any]], expected: list[str], way: str
) -> None:
    history = [{"role": "user", "content": "Tea?"}, *items]
    async with scripted_gateway(SUMMARY_SCRIPT, ANSWER) as gateway:
        if way == "compact":
            output = (await compact(gateway, input=history)).json()["output"]
        else:
            body = {"model": "gpt-oss", "store": False, "input": [*history, {"type": "compaction_trigger"}]}
            output = (await gateway.post("/v1/responses", body)).json()["output"]
        await gateway.post("/v1/responses", {"model": "gpt-oss", "store": False, "input": [*output, OUTPUTS[1]]})
        kept = items_of_request(gateway)[-1 - len(expected) :]
        assert [call_or_text(item) for item in kept] == [*expected, "c3"]
        assert isinstance(items_of_request(gateway)[-2 - len(expected)], UserMessage)


NEWEST: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    # case: (items after the user's message, items after the summary)
    "one call": ([THOUGHT, CALLS[0], OUTPUTS[0]], ["Into the cup.", "c2", "c2"]),
    "parallel calls": ([THOUGHT, *CALLS, *OUTPUTS], ["Into the cup.", "c2", "c2", "c3", "c3"]),
    "steps without reasoning": ([CALLS[0], OUTPUTS[0], PREAMBLE, CALLS[1], OUTPUTS[1]], ["I look.", "c3", "c3"]),
    "calls without reasoning": ([PREAMBLE, CALLS[0], OUTPUTS[0], CALLS[1], OUTPUTS[1]], ["c3", "c3"]),
    "one of two outputs": ([THOUGHT, *CALLS, OUTPUTS[1]], ["Into the cup.", "c2", "c3", "c3"]),
}


@pytest.mark.parametrize(("items", "expected"), NEWEST.values(), ids=NEWEST)
@pytest.mark.parametrize("way", ["compact", "compaction_trigger"])
async def test_outputs_that_the_model_has_not_answered_stay_with_their_calls(
    items: list[dict[str, Any]], expected: list[str], way: str
) -> None:
    history = [{"role": "user", "content": "Tea?"}, *items]
    async with scripted_gateway(SUMMARY_SCRIPT, ANSWER) as gateway:
        if way == "compact":
            output = (await compact(gateway, input=history)).json()["output"]
        else:
            body = {"model": "gpt-oss", "input": [*history, {"type": "compaction_trigger"}]}
            output = (await gateway.post("/v1/responses", body)).json()["output"]
        first = (await gateway.post("/v1/responses", {"model": "gpt-oss", "input": output})).json()
        body = {"model": "gpt-oss", "input": "And now?", "previous_response_id": first["id"]}
        await gateway.post("/v1/responses", body)
        for turn, later in ((-2, []), (-1, ["Yes.", "And now?"])):
            question, summary, *kept = items_of_request(gateway, turn)
            assert question == UserMessage("Tea?")
            assert isinstance(summary, UserMessage)
            assert summary.text.endswith(SUMMARY)
            assert [call_or_text(item) for item in kept] == [*expected, *later]


PAIRS = ["c2", "c2", "c3", "c3"]


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("again", [CALLS, [THOUGHT, PREAMBLE, *CALLS]], ids=["calls", "whole turn"])
async def test_calls_that_follow_their_compaction_again_appear_once(again: list[dict[str, Any]], stored: bool) -> None:
    history = [{"role": "user", "content": "Tea?"}, THOUGHT, PREAMBLE, *CALLS, {"type": "compaction_trigger"}]
    async with scripted_gateway(SUMMARY_SCRIPT, ANSWER) as gateway:
        body = {"model": "gpt-oss", "store": stored, "input": history}
        output = (await gateway.post("/v1/responses", body)).json()["output"]
        if stored:
            output = [{"type": "item_reference", "id": output[0]["id"]}]
        body = {"model": "gpt-oss", "store": stored, "input": [*output, *again, *OUTPUTS]}
        answer = (await gateway.post("/v1/responses", body)).json()
        assert "notes" not in answer["unisono"]
        if stored:
            body = {"model": "gpt-oss", "input": "And now?", "previous_response_id": answer["id"]}
            await gateway.post("/v1/responses", body)
        _, _, *kept = items_of_request(gateway)
        assert [call_or_text(item) for item in kept[:6]] == ["Into the cup.", "I look.", *PAIRS]
        assert [call_or_text(item) for item in kept[6:]] == (["Yes.", "And now?"] if stored else [])


async def test_calls_that_precede_their_compaction_appear_once() -> None:
    history = [{"role": "user", "content": "Tea?"}, THOUGHT, *CALLS]
    async with scripted_gateway(SUMMARY_SCRIPT, ANSWER) as gateway:
        [*_, compaction] = (await compact(gateway, input=history)).json()["output"]
        await gateway.post("/v1/responses", {"model": "gpt-oss", "input": [*history, compaction, *OUTPUTS]})
        _, _, *kept = items_of_request(gateway)
        assert [call_or_text(item) for item in kept] == ["Into the cup.", *PAIRS]


async def test_a_preamble_in_a_compaction_does_not_replace_the_users_messages() -> None:
    async with scripted_gateway(SUMMARY_SCRIPT, ANSWER) as gateway:
        history = [{"role": "user", "content": "Tea?"}, PREAMBLE, CALLS[1]]
        output = (await compact(gateway, input=history)).json()["output"]
        body = {"model": "gpt-oss", "input": [*output, OUTPUTS[1]]}
        first = (await gateway.post("/v1/responses", body)).json()
        body = {"model": "gpt-oss", "input": "And now?", "previous_response_id": first["id"]}
        await gateway.post("/v1/responses", body)
        assert items_of_request(gateway)[0] == UserMessage("Tea?")


def call_or_text(item: Item) -> str:
    return item.call_id if isinstance(item, AssistantCall | ToolResult) else getattr(item, "text", "")


async def test_a_call_that_was_given_up_is_only_part_of_the_summary() -> None:
    given_up = [{**CONVERSATION[2], "call_id": "c2"}, {"role": "user", "content": "Never mind."}]
    async with scripted_gateway(SUMMARY_SCRIPT, ANSWER) as gateway:
        output = (await compact(gateway, input=[*CONVERSATION, *given_up, CONVERSATION[4]])).json()["output"]
        await gateway.post("/v1/responses", {"model": "gpt-oss", "input": [*output, CONVERSATION[5]]})
        assert not any(isinstance(item, AssistantCall) for item in items_of_request(gateway))
