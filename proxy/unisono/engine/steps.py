"""Continuation: what one generation left behind decides whether another follows, and from which tokens.

`next_step` is pure. A step never rewrites anything: it extends the conversation by what was generated, and by what the
gateway's own tools came to, and opens the message that is to follow where the model is not to choose it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, assert_never

from unisono.core.conversation import (
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    Item,
    Phase,
    Tokens,
)
from unisono.core.events import Closed, HostedCall, Listing, Reasoning, Text, ToolCall
from unisono.core.generation import FinishReason


@dataclass(frozen=True, slots=True)
class ServerToolCall:
    """A call of a hosted tool as the model made it; `arguments` are its own text. `approval` is the id under which it
    was agreed to, for one that stands in the conversation already: then it has no tokens."""

    call_id: str
    name: str
    arguments: str
    tokens: Tokens = ()
    approval: str = ""


@dataclass(frozen=True, slots=True)
class AnswerState:
    """What is known of an answer when a step of it has ended, or when what it called was run."""

    reason: FinishReason = FinishReason.STOP
    shown: bool = False
    """Whether anything but reasoning came in the step."""
    answered: bool = False
    """Whether text on `final` did."""
    cut_call: bool = False
    opened: bool = False
    """Whether the gateway opened the step's message: what comes of that stands."""
    calls: tuple[ServerToolCall, ...] = ()
    """Calls of hosted tools in the step, complete ones."""
    ran: bool = False
    """Whether those were run: then it is over with the step."""
    handed: bool = False
    """Whether somebody else has something to do: calls of the client, or requests for approval, are open."""
    exhausted: bool = False
    """Whether no more tools are run."""
    paused: bool = False
    """Whether none are run before the client wants it."""


@dataclass(frozen=True, slots=True)
class AnswerDone:
    """The answer is over, or what is left is the client's to do; if only to have it go on where it `paused`."""

    paused: bool = False


@dataclass(frozen=True, slots=True)
class Generate:
    """The model goes on by itself."""


@dataclass(frozen=True, slots=True)
class OpenFinal:
    """Open the answer that the model owes and let it continue."""

    rule: str = "analysis-only"


@dataclass(frozen=True, slots=True)
class RunTools:
    """Run these, one after the other, and decide again."""

    calls: tuple[ServerToolCall, ...]


Step: TypeAlias = AnswerDone | Generate | OpenFinal | RunTools


def next_step(answer: AnswerState) -> Step:
    """Calls are run as long as there may be any. An answer that is only thoughts is opened once, and so is one that may
    not call any more; everything else is as it is."""
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
    """A finished item as it stands in the answer's next prompt. Text is a preamble there, whatever its channel: behind
    an answer the renderer leaves thoughts out, and this turn still goes on. Its tokens are the ones it has."""
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
