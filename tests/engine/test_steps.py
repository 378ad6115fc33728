"""Choice of the next step, and conversation items of a finished step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono.core.conversation import AssistantCall, AssistantMessage, AssistantReasoning, Item, Phase
from unisono.core.events import Closed, HostedCall, Listing, Reasoning, Text, ToolCall
from unisono.core.generation import FinishReason
from unisono.core.tool_host import ServerToolCall
from unisono.engine.steps import (
    AnswerDone,
    AnswerState,
    ContinueTurn,
    Generate,
    OpenFinal,
    RunTools,
    Step,
    next_step,
    to_item,
)

LENGTH = FinishReason.LENGTH
CALLS = (ServerToolCall("call_1", "docs__search", "{}", (4,)),)
CALLED = AnswerState(calls=CALLS)
RAN = replace(CALLED, has_run=True)

CASES: dict[str, tuple[AnswerState, Step]] = {
    "answer or client call": (AnswerState(has_output=True), AnswerDone()),
    "only reasoning or empty output": (AnswerState(), OpenFinal()),
    "preamble": (AnswerState(has_output=True, is_dangling=True), ContinueTurn()),
    "second preamble": (
        AnswerState(has_output=True, is_dangling=True, was_continued=True),
        OpenFinal("dangling-preamble"),
    ),
    "preamble up to the limit": (AnswerState(LENGTH, has_output=True, is_dangling=True), AnswerDone()),
    "preamble and an incomplete call": (AnswerState(has_output=True, is_dangling=True, cut_call=True), AnswerDone()),
    "preamble and a server call": (replace(CALLED, has_output=True, is_dangling=True), RunTools(CALLS)),
    "reasoning up to the limit": (AnswerState(LENGTH), AnswerDone()),
    "reasoning and an incomplete call": (AnswerState(cut_call=True), AnswerDone()),
    "only reasoning in an opened answer": (AnswerState(is_final_open=True), AnswerDone()),
    "server call": (CALLED, RunTools(CALLS)),
    "server call and client call": (replace(CALLED, has_output=True, needs_client=True), RunTools(CALLS)),
    "server call and answer": (replace(CALLED, has_output=True, has_final=True), RunTools(CALLS)),
    "server call in an opened answer": (
        replace(CALLED, is_final_open=True, has_output=True),
        RunTools(CALLS),
    ),
    "server call at the limit": (replace(CALLED, reason=LENGTH), AnswerDone()),
    "server call after the call limit": (replace(CALLED, exhausted=True), OpenFinal("tools-ended")),
    "server call after the call limit in an opened answer": (
        replace(CALLED, exhausted=True, is_final_open=True, has_output=True),
        AnswerDone(),
    ),
    "results": (RAN, Generate()),
    "results after an answer": (replace(RAN, has_output=True, has_final=True), Generate()),
    "results, client action required": (replace(RAN, needs_client=True), AnswerDone()),
    "results at the call limit": (replace(RAN, exhausted=True), OpenFinal("tools-ended")),
    "results at the call limit, preamble": (replace(RAN, exhausted=True, has_output=True), OpenFinal("tools-ended")),
    "results at the call limit, answer": (replace(RAN, exhausted=True, has_output=True, has_final=True), AnswerDone()),
    "results at the call limit, client action required": (
        replace(RAN, exhausted=True, needs_client=True),
        AnswerDone(),
    ),
    "results at a pause": (replace(RAN, paused=True), AnswerDone(paused=True)),
    "results at a pause, answer": (
        replace(RAN, paused=True, has_output=True, has_final=True),
        AnswerDone(paused=True),
    ),
    "results at a pause, client action required": (replace(RAN, paused=True, needs_client=True), AnswerDone()),
    "results at a pause and the call limit": (replace(RAN, paused=True, exhausted=True), OpenFinal("tools-ended")),
}


@pytest.mark.parametrize(("answer", "step"), CASES.values(), ids=CASES)
def test_next_step_returns_the_expected_step(answer: AnswerState, step: Step) -> None:
    assert next_step(answer) == step


ITEMS: dict[str, tuple[Closed, Item | None]] = {
    "reasoning": (Closed(Reasoning(0), "Hm.", (1, 2)), AssistantReasoning("Hm.", (1, 2))),
    "a preamble": (Closed(Text(0, Phase.COMMENTARY), "So", (3,)), AssistantMessage("So", Phase.COMMENTARY, (3,))),
    "answer before further steps": (
        Closed(Text(0, Phase.FINAL), "So", (3,)),
        AssistantMessage("So", Phase.COMMENTARY, (3,)),
    ),
    "a call": (Closed(ToolCall(0, 0, "call_1", "f"), "{}", (4,)), AssistantCall("call_1", "f", "{}", (4,))),
    "server call": (
        Closed(HostedCall(0, "call_1", "s__f", "s", "f"), "{}", (4,)),
        AssistantCall("call_1", "s__f", "{}", (4,)),
    ),
    "a listing": (Closed(Listing(0, "s"), ""), None),
}


@pytest.mark.parametrize(("closed", "item"), ITEMS.values(), ids=ITEMS)
def test_to_item_keeps_the_tokens(closed: Closed, item: Item | None) -> None:
    assert to_item(closed) == item
