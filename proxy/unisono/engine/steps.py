"""Step transitions: the state after a generation determines the next step.

`next_step` is pure. A step never rewrites anything. It extends the conversation by the generated items and the results
of server tools. It opens the next message if the model must not choose it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

from unisono.core.conversation import (
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    Conversation,
    Item,
    Phase,
    ToolResult,
)
from unisono.core.events import Closed, HostedCall, Listing, Reasoning, Text, ToolCall
from unisono.core.generation import FinishReason
from unisono.engine.server_tools.tools import ServerToolCall


@dataclass(frozen=True, slots=True)
class AnswerState:
    """State of an answer at the end of a step, or after its tools were run."""

    reason: FinishReason = FinishReason.STOP
    shown: bool = False  # the step contains anything but reasoning
    answered: bool = False  # the step contains text on `final`
    cut_call: bool = False
    opened: bool = False  # the gateway opened the step's message, so its outcome is final
    calls: tuple[ServerToolCall, ...] = ()  # complete calls of server tools in the step
    ran: bool = False  # the calls were run, which ends the step
    handed: bool = False  # the client has to act: its own calls, or requests for approval, are open
    exhausted: bool = False  # no more tools are run
    paused: bool = False  # no more tools are run until the client continues the answer


@dataclass(frozen=True, slots=True)
class StepContext:
    """What the steps before the current one add to the conversation.

    `number` is the number of those steps. `items` are their items with the results of server tools; `results` are the
    results that a prompt already contains. With `is_final_open`, the prompt ends in the header of the answer.
    """

    number: int = 0
    is_final_open: bool = False
    items: tuple[Item, ...] = ()
    results: tuple[ToolResult, ...] = ()

    def extended(self, conversation: Conversation) -> Conversation:
        """Return the conversation that the current step continues."""
        if not self.number:
            return conversation
        prefill = "" if self.is_final_open else None
        return replace(conversation, items=(*conversation.items, *self.items), prefill=prefill)


@dataclass(frozen=True, slots=True)
class AnswerDone:
    """The answer is complete, or the client has to act.

    `paused`: the client only has to continue it.
    """

    paused: bool = False


@dataclass(frozen=True, slots=True)
class Generate:
    """Let the model continue freely."""


@dataclass(frozen=True, slots=True)
class OpenFinal:
    """Open the answer that the model owes and let it continue."""

    rule: str = "analysis-only"


@dataclass(frozen=True, slots=True)
class RunTools:
    """Run these calls one after the other, and decide again."""

    calls: tuple[ServerToolCall, ...]


Step: TypeAlias = AnswerDone | Generate | OpenFinal | RunTools


def next_step(answer: AnswerState) -> Step:
    """Return the next step of an answer.

    Calls run while any are allowed, and the model continues after their results. If the answer contains only reasoning,
    or no more calls are allowed, the final message is opened once. Otherwise the answer is complete.
    """
    if answer.ran:
        return _behind_results(answer)
    if answer.reason is not FinishReason.STOP:
        return AnswerDone()
    if answer.calls and not answer.exhausted:
        return RunTools(answer.calls)
    if answer.shown or answer.cut_call or answer.opened:
        return AnswerDone()
    return OpenFinal("tools-ended") if answer.calls else OpenFinal()


def _behind_results(answer: AnswerState) -> Step:
    if answer.handed:
        return AnswerDone()
    if answer.exhausted:
        return AnswerDone() if answer.answered else OpenFinal("tools-ended")
    return AnswerDone(paused=True) if answer.paused else Generate()


def to_said(closed: Closed) -> Item | None:
    """Convert a finished item for the next step's prompt; its tokens stay the same.

    Text on any channel becomes a preamble. After a final answer the renderer would omit reasoning, but this answer is
    still in progress.
    """
    match closed.item:
        case Reasoning():
            return AssistantReasoning(closed.text, closed.tokens)
        case Text():
            return AssistantMessage(closed.text, Phase.COMMENTARY, closed.tokens)
        case ToolCall(call_id=call_id, name=name) | HostedCall(call_id=call_id, name=name):
            return AssistantCall(call_id, name, closed.text, closed.tokens)
        case Listing():
            return None
        case _:
            assert_never(closed.item)
