"""Continuation: what one generation left behind decides whether another follows, and from which tokens.

`next_step` is pure. A step never rewrites anything: it extends the conversation by what was generated and opens the
message that is to follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from unisono.core.conversation import AssistantReasoning, Conversation
from unisono.core.events import Closed, Reasoning
from unisono.core.generation import FinishReason


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of an answer after its last step."""

    steps: int = 0
    reason: FinishReason = FinishReason.STOP
    thoughts: tuple[Closed, ...] = ()
    shown: bool = False
    """Whether anything but reasoning came."""
    cut_call: bool = False

    def after(self, reason: FinishReason, closed: Sequence[Closed], *, cut_call: bool) -> Answer:
        """The answer after one more step; `closed` are the items of all steps."""
        thoughts = tuple(item for item in closed if isinstance(item.item, Reasoning))
        return Answer(self.steps + 1, reason, thoughts, len(thoughts) < len(closed), self.cut_call or cut_call)


@dataclass(frozen=True, slots=True)
class Done:
    pass


@dataclass(frozen=True, slots=True)
class OpenFinal:
    """The model thought and stopped: open the answer it owes and let it continue."""

    thoughts: tuple[Closed, ...]
    rule: str = "analysis-only"

    def extend(self, conversation: Conversation) -> Conversation:
        said = tuple(AssistantReasoning(item.text, item.tokens) for item in self.thoughts)
        return replace(conversation, items=(*conversation.items, *said), prefill="")


Step: TypeAlias = Done | OpenFinal


def next_step(answer: Answer) -> Step:
    """An answer that is only thoughts is opened once; everything else is as it is."""
    if answer.steps == 1 and answer.reason is FinishReason.STOP and not answer.shown and not answer.cut_call:
        return OpenFinal(answer.thoughts)
    return Done()
