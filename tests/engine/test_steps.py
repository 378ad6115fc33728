"""What one generation leaves behind, and whether another follows."""

from __future__ import annotations

import pytest

from unisono.core.conversation import AssistantReasoning, Conversation, Phase, Preamble, UserMessage
from unisono.core.events import Closed, Reasoning, Text, ToolCall
from unisono.core.generation import FinishReason
from unisono.engine.steps import Answer, Done, OpenFinal, Step, next_step

THOUGHT = Closed(Reasoning(0), "Hm.", (1, 2))
ANSWER = Closed(Text(1, Phase.FINAL), "ok", (3,))
CALL = Closed(ToolCall(1, 0, "call_1", "f"), "{}", (4,))
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH

CASES: dict[str, tuple[Answer, Step]] = {
    "an answer": (Answer().after(STOP, [THOUGHT, ANSWER], cut_call=False), Done()),
    "a call": (Answer().after(STOP, [THOUGHT, CALL], cut_call=False), Done()),
    "only thoughts": (Answer().after(STOP, [THOUGHT], cut_call=False), OpenFinal((THOUGHT,))),
    "nothing at all": (Answer().after(STOP, [], cut_call=False), OpenFinal(())),
    "thoughts up to the limit": (Answer().after(LENGTH, [THOUGHT], cut_call=False), Done()),
    "thoughts and half a call": (Answer().after(STOP, [THOUGHT], cut_call=True), Done()),
    "only thoughts, twice": (
        Answer().after(STOP, [THOUGHT], cut_call=False).after(STOP, [THOUGHT], cut_call=False),
        Done(),
    ),
}


@pytest.mark.parametrize(("answer", "step"), CASES.values(), ids=CASES)
def test_the_next_step(answer: Answer, step: Step) -> None:
    assert next_step(answer) == step


def test_opening_the_answer_keeps_the_thoughts_tokens() -> None:
    asked = Conversation(Preamble(), (UserMessage("Hi"),))
    extended = OpenFinal((THOUGHT,)).extend(asked)
    assert extended.items == (UserMessage("Hi"), AssistantReasoning("Hm.", (1, 2)))
    assert extended.prefill == ""
