"""What one step leaves behind, and what follows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono.core.conversation import AssistantCall, AssistantMessage, AssistantReasoning, Item, Phase
from unisono.core.events import Closed, HostedCall, Listing, Reasoning, Text, ToolCall
from unisono.core.generation import FinishReason
from unisono.core.tools import ServerToolCall
from unisono.engine.steps import AnswerDone, AnswerState, Generate, OpenFinal, RunTools, Step, next_step, to_item

LENGTH = FinishReason.LENGTH
CALLS = (ServerToolCall("call_1", "docs__search", "{}", (4,)),)
CALLED = AnswerState(calls=CALLS)
RAN = replace(CALLED, has_run=True)

CASES: dict[str, tuple[AnswerState, Step]] = {
    "an answer, or a call of the client": (AnswerState(has_output=True), AnswerDone()),
    "only thoughts, or nothing at all": (AnswerState(), OpenFinal()),
    "thoughts up to the limit": (AnswerState(LENGTH), AnswerDone()),
    "thoughts and half a call": (AnswerState(cut_call=True), AnswerDone()),
    "only thoughts in an answer that was opened": (AnswerState(is_final_open=True), AnswerDone()),
    "a hosted call": (CALLED, RunTools(CALLS)),
    "a hosted call, and one of the client": (replace(CALLED, has_output=True, needs_client=True), RunTools(CALLS)),
    "a hosted call, and an answer": (replace(CALLED, has_output=True, has_final=True), RunTools(CALLS)),
    "a hosted call in an answer that was opened": (
        replace(CALLED, is_final_open=True, has_output=True),
        RunTools(CALLS),
    ),
    "a hosted call at the limit": (replace(CALLED, reason=LENGTH), AnswerDone()),
    "a hosted call when there may be none": (replace(CALLED, exhausted=True), OpenFinal("tools-ended")),
    "such a call behind an opened answer": (
        replace(CALLED, exhausted=True, is_final_open=True, has_output=True),
        AnswerDone(),
    ),
    "results": (RAN, Generate()),
    "results behind an answer": (replace(RAN, has_output=True, has_final=True), Generate()),
    "results, and calls of the client or approvals open": (replace(RAN, needs_client=True), AnswerDone()),
    "results, the last there are": (replace(RAN, exhausted=True), OpenFinal("tools-ended")),
    "the last results, and a preamble": (replace(RAN, exhausted=True, has_output=True), OpenFinal("tools-ended")),
    "the last results, and an answer": (replace(RAN, exhausted=True, has_output=True, has_final=True), AnswerDone()),
    "the last results, and calls of the client": (replace(RAN, exhausted=True, needs_client=True), AnswerDone()),
    "results behind which the turn pauses": (replace(RAN, paused=True), AnswerDone(paused=True)),
    "such results, and an answer": (
        replace(RAN, paused=True, has_output=True, has_final=True),
        AnswerDone(paused=True),
    ),
    "such results, and calls of the client": (replace(RAN, paused=True, needs_client=True), AnswerDone()),
    "such results, the last there are": (replace(RAN, paused=True, exhausted=True), OpenFinal("tools-ended")),
}


@pytest.mark.parametrize(("answer", "step"), CASES.values(), ids=CASES)
def test_the_next_step(answer: AnswerState, step: Step) -> None:
    assert next_step(answer) == step


SAID: dict[str, tuple[Closed, Item | None]] = {
    "thoughts": (Closed(Reasoning(0), "Hm.", (1, 2)), AssistantReasoning("Hm.", (1, 2))),
    "a preamble": (Closed(Text(0, Phase.COMMENTARY), "So", (3,)), AssistantMessage("So", Phase.COMMENTARY, (3,))),
    "an answer the turn goes on behind": (
        Closed(Text(0, Phase.FINAL), "So", (3,)),
        AssistantMessage("So", Phase.COMMENTARY, (3,)),
    ),
    "a call": (Closed(ToolCall(0, 0, "call_1", "f"), "{}", (4,)), AssistantCall("call_1", "f", "{}", (4,))),
    "a hosted call": (
        Closed(HostedCall(0, "call_1", "s__f", "s", "f"), "{}", (4,)),
        AssistantCall("call_1", "s__f", "{}", (4,)),
    ),
    "a listing": (Closed(Listing(0, "s"), ""), None),
}


@pytest.mark.parametrize(("closed", "item"), SAID.values(), ids=SAID)
def test_what_was_said_keeps_its_tokens(closed: Closed, item: Item | None) -> None:
    assert to_item(closed) == item
