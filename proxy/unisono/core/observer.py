"""What is told about a turn to whoever counts, traces or records: facts, gathered while it runs and told when it ends.

Times are seconds of the monotonic clock since the turn began, but for the one of the wall clock it began at. Telling
costs the answer time, so observers only note what they are told and do the work elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from unisono.core.conversation import Json
from unisono.core.events import Closed, Repaired
from unisono.core.generation import Usage
from unisono.core.route_protocol import Attempt
from unisono.core.trace_context import TraceContext

GAPS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds by which times between tokens are counted, in seconds; longer ones come behind the last."""


class GenerationOutcome(StrEnum):
    """How a turn ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    LEFT = "left"
    """Nobody waited for the rest of it."""


@dataclass(frozen=True, slots=True)
class GenerationBegan:
    """A turn that begins. `key` is the public id of a virtual key, `model` a group's name from the configuration,
    `at` the time in seconds since 1970, and `span` the turn's own; `span_parent` is the id of the one it came from.
    `asked` is what a turn that is recorded asked for (`engine.asked`)."""

    request_id: str
    tenant: str
    key: str
    surface: str
    model: str
    background: bool
    at: float
    resumed: bool = False
    """Whether it goes on behind what another run left."""
    span: TraceContext | None = None
    span_parent: str = ""
    asked: Mapping[str, Json] | None = None


@dataclass(frozen=True, slots=True)
class SlotWait:
    """A wait for a place on a deployment; `failure` is the code of what it ended in when there was none."""

    began_s: float
    ended_s: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class StepDone:
    """One generation on one deployment. A step of the answer has several where one failed, or where something was put
    into the answer; `step` counts steps from 0. `prompt_tokens` are all it went on behind, `cached_tokens` what the
    backend says it had of them, None when it says nothing. `finish` is what stopped it, empty where the gateway did;
    `failure` the code of the error it ended in. `gaps` counts times between tokens by `GAPS_S`, and `gaps_s` is all of
    them together. `prompt` holds the tokens only of a turn that is recorded."""

    step: int
    deployment: str
    began_s: float
    first_token_s: float | None
    ended_s: float
    prompt_tokens: int
    cached_tokens: int | None
    generated: int
    finish: str = ""
    failure: str = ""
    gaps: Sequence[int] = ()
    gaps_s: float = 0.0
    prompt: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RefusedConstraint:
    """A constraint that a generation on `deployment` ran without. `reason` is `rejected`, or the symptom of the
    failure (`server_error`, `disconnected`), or `remembered`: the backend was not asked, since it had failed on that
    constraint before."""

    deployment: str
    reason: str


class ToolEnd(StrEnum):
    """What came of a hosted call that was made."""

    OK = "ok"
    ERROR = "error"
    UNKNOWN = "unknown"
    """It may have been carried out."""
    LEFT = "left"
    """Nobody waited for it any more."""


@dataclass(frozen=True, slots=True)
class ToolDone:
    """One call of a hosted tool that was made. `server` is its label, `call_id` the one the model's call goes by."""

    server: str
    name: str
    call_id: str
    began_s: float
    ended_s: float
    outcome: ToolEnd


@dataclass(slots=True)
class GenerationFacts:
    """What the engine tells of a run: it grows while that runs, by the step and never by the token."""

    waits: list[SlotWait] = field(default_factory=list)
    steps: list[StepDone] = field(default_factory=list)
    tools: list[ToolDone] = field(default_factory=list)
    refused_constraints: list[RefusedConstraint] = field(default_factory=list)

    @property
    def usage(self) -> Usage:
        """What was taken so far, for a run that does not come to its end."""
        if not self.steps:
            return Usage()
        return Usage(
            prompt_tokens=self.steps[0].prompt_tokens,
            completion_tokens=sum(step.generated for step in self.steps),
            cached_tokens=self.steps[0].cached_tokens or 0,
        )


@dataclass(frozen=True, slots=True)
class GenerationDone:
    """A turn that ended. `first_s` is when the first events were handed to the surface; `error` is the code of what it
    ended in. `channels` counts tokens in bodies of whole messages by what they were: `analysis`, `commentary`, `final`,
    `call` for the client's calls, `hosted_call` for the gateway's own. `recoveries` are rules, each once, and `repairs`
    where they were applied as far as it was shown. `journal` is the run's own (`engine.turn.Report`). `said` are all
    items and repairs of a turn that is recorded, in their order, those that an earlier run left too."""

    began: GenerationBegan
    ended_s: float
    outcome: GenerationOutcome
    first_s: float | None = None
    error: str = ""
    finish: str = ""
    usage: Usage | None = None
    channels: Mapping[str, int] = field(default_factory=dict)
    recoveries: Sequence[str] = ()
    repairs: Sequence[Repaired] = ()
    waits: Sequence[SlotWait] = ()
    steps: Sequence[StepDone] = ()
    tools: Sequence[ToolDone] = ()
    refused_constraints: Sequence[RefusedConstraint] = ()
    tries: Sequence[Attempt] = ()
    backend: str = ""
    failovers: int = 0
    left_out: int = 0
    unmet: str = ""
    journal: Sequence[int] = ()
    said: Sequence[Closed | Repaired] = ()

    @property
    def waited_s(self) -> float:
        """All the time it waited for places."""
        return sum(wait.ended_s - wait.began_s for wait in self.waits)


class Observer(Protocol):
    """Is told of every turn. Both methods return at once and do not raise."""

    def began(self, began: GenerationBegan) -> None: ...

    def ended(self, done: GenerationDone) -> None: ...


class Pace:
    """When the tokens of one generation came, in seconds of any clock that never goes back."""

    __slots__ = ("_last", "first", "gaps", "gaps_s", "largest_gap_s", "tokens")

    def __init__(self) -> None:
        self.first: float | None = None
        self.tokens = 0
        self.gaps: list[int] = []
        """By `GAPS_S`; empty before there is a token."""
        self.gaps_s = 0.0
        self.largest_gap_s = 0.0
        self._last = 0.0

    def came(self, tokens: int, now: float) -> None:
        """Some tokens, at least one, came at once: the time since the last ones is shared among them."""
        if self.first is None:
            self.first = now
            # What came with the first token was not waited for.
            self.gaps = [0] * (len(GAPS_S) + 1)
        else:
            gap = now - self._last
            self.gaps_s += gap
            if gap > self.largest_gap_s:
                self.largest_gap_s = gap
            self.gaps[bisect_left(GAPS_S, gap / tokens)] += tokens
        self.tokens += tokens
        self._last = now
