"""One turn: from a conversation to a stream of events, whatever the backend does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from unisono.core.conversation import Conversation
from unisono.core.events import Event
from unisono.core.generation import Sampling


@dataclass(frozen=True, slots=True)
class Turn:
    """What a surface asks of the engine. `model` is the group's name after aliases; `max_tokens` None means what the
    context still holds. `stop` are the client's stop strings, matched against visible text by the gateway."""

    model: str
    conversation: Conversation
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    calls_allowed: bool = True
    """False for `tool_choice: none`: no call reaches the client."""
    parallel_calls: bool = True
    """False keeps one call of the answer and drops the later ones."""
    hold_calls: bool = True
    """False shows a call's arguments while they are generated (`stream_tool_arguments`)."""
    whole: bool = False
    """The client sees nothing before the end: the answer is one batch, and until then may begin anew elsewhere."""
    tenant: str = ""
    request_id: str = ""


@dataclass(slots=True)
class Report:
    """What is known of a run besides its events; grows while it runs."""

    backend: str = ""
    failovers: int = 0
    recoveries: list[str] = field(default_factory=list)
    """Rule names in order of first occurrence, each once."""


class Run(Protocol):
    """A turn in progress. Iterating yields one batch of events per network read of the backend, none empty; the last
    batch ends with Finished. Errors before the first batch are raised by the first `__anext__`, later ones in the
    middle. `aclose` (or cancelling the iterating task) frees the backend at once."""

    report: Report

    def __aiter__(self) -> AsyncIterator[list[Event]]: ...

    async def aclose(self) -> None: ...


class Turns(Protocol):
    """What surfaces see of the engine."""

    def start(self, turn: Turn) -> Run: ...
