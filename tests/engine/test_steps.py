"""What one step leaves behind, and what follows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono.core.conversation import AssistantCall, AssistantMessage, AssistantReasoning, Item, Phase
from unisono.core.events import Closed, HostedCall, Listing, Reasoning, Text, ToolCall
from unisono.core.generation import FinishReason
from unisono.engine.steps import Answer, Call, Done, Generate, OpenFinal, RunTools, Step, next_step, to_said

LENGTH = FinishReason.LENGTH
CALLS = (Call("call_1", "docs__search", "{}", (4,)),)
CALLED = Answer(calls=CALLS)
RAN = replace(CALLED, ran=True)

CASES: dict[str, tuple[Answer, Step]] = {
    "an answer, or a call of the client": (Answer(shown=True), Done()),
    "only thoughts, or nothing at all": (Answer(), OpenFinal()),
    "thoughts up to the limit": (Answer(LENGTH), Done()),
    "thoughts and half a call": (Answer(cut_call=True), Done()),
    "only thoughts in an answer that was opened": (Answer(opened=True), Done()),
    "a hosted call": (CALLED, RunTools(CALLS)),
    "a hosted call, and one of the client": (replace(CALLED, shown=True, handed=True), RunTools(CALLS)),
    "a hosted call, and an answer": (replace(CALLED, shown=True, answered=True), RunTools(CALLS)),
    "a hosted call in an answer that was opened": (replace(CALLED, opened=True, shown=True), RunTools(CALLS)),
    "a hosted call at the limit": (replace(CALLED, reason=LENGTH), Done()),
    "a hosted call when there may be none": (replace(CALLED, exhausted=True), OpenFinal("tools-ended")),
    "such a call behind an opened answer": (replace(CALLED, exhausted=True, opened=True, shown=True), Done()),
    "results": (RAN, Generate()),
    "results behind an answer": (replace(RAN, shown=True, answered=True), Generate()),
    "results, and calls of the client or approvals open": (replace(RAN, handed=True), Done()),
    "results, the last there are": (replace(RAN, exhausted=True), OpenFinal("tools-ended")),
    "the last results, and a preamble": (replace(RAN, exhausted=True, shown=True), OpenFinal("tools-ended")),
    "the last results, and an answer": (replace(RAN, exhausted=True, shown=True, answered=True), Done()),
    "the last results, and calls of the client": (replace(RAN, exhausted=True, handed=True), Done()),
    "results behind which the turn pauses": (replace(RAN, paused=True), Done(paused=True)),
    "such results, and an answer": (replace(RAN, paused=True, shown=True, answered=True), Done(paused=True)),
    "such results, and calls of the client": (replace(RAN, paused=True, handed=True), Done()),
    "such results, the last there are": (replace(RAN, paused=True, exhausted=True), OpenFinal("tools-ended")),
}


@pytest.mark.parametrize(("answer", "step"), CASES.values(), ids=CASES)
def test_the_next_step(answer: Answer, step: Step) -> None:
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
    assert to_said(closed) == item
