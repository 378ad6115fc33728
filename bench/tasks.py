"""Types of measurements: kinds of work, arms, verdicts, and scenarios."""

from __future__ import annotations

from dataclasses import dataclass

from bench.fake_vllm import Pace
from bench.load import ColdPrompts

FULL_SPEED = Pace()


@dataclass(frozen=True, slots=True)
class PriorTurns:
    """Stored turns that requests continue, each of `count` sequences equally often.

    See `bench.prior_turns`.
    """

    variant: str
    turns: int
    count: int


@dataclass(frozen=True, slots=True)
class Work:
    """Load without an address; see `bench.load.Load`."""

    streams: int
    tokens: int
    requests: int = 1
    stream: bool = True
    spread_s: float = 0.0
    history: int = 0
    fresh: bool = False
    disconnect_after_s: float = 0.0
    cold: ColdPrompts | None = None
    pace: Pace = FULL_SPEED
    # Wire of the clients; empty for the contender's default.
    wire: str = ""
    prior: PriorTurns | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """Start of a separate process up to its first healthy answer.

    With `memory_load`, its memory growth is measured under this load.
    """

    memory_load: Work | BackgroundWork | None = None


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """Background responses; see `bench.background_load`."""

    streams: int
    watched: int
    tokens: int
    spread_s: float
    pace: Pace


@dataclass(frozen=True, slots=True)
class RenderWork:
    """Render of a conversation without a server; see `bench.render_timing`."""

    variant: str
    words: int
    times: int


@dataclass(frozen=True, slots=True)
class ToolLoopWork:
    """Turns with several tool calls; see `bench.tool_loop_load`."""

    streams: int
    requests: int
    words: int


@dataclass(frozen=True, slots=True)
class InterventionWork:
    """Answers with requirements, without a server; see `bench.intervention_timing`."""

    variant: str
    times: int


@dataclass(frozen=True, slots=True)
class SelectionWork:
    """Selection among many deployments, without a server; see `bench.selection_timing`."""

    variant: str
    times: int


@dataclass(frozen=True, slots=True)
class FailoverWork:
    """Streams that break off and continue on another backend; see `bench.failover_load`."""

    variant: str
    streams: int
    requests: int
    words: int


Task = Work | Launch | BackgroundWork | RenderWork | ToolLoopWork | InterventionWork | SelectionWork | FailoverWork


@dataclass(frozen=True, slots=True)
class Arm:
    """One contender under one load."""

    label: str
    contender: str
    work: Task


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ratio of a column of two arms, or their difference; without `against`, the value itself.

    `aim` is the maximum, or with `at_least` the minimum. `baselines` names an arm for each of the two, whose value is
    subtracted first; the verdict then compares what the arms add.
    """

    column: str
    of: str
    against: str = ""
    difference: bool = False
    aim: float | None = None
    at_least: bool = False
    baselines: tuple[str, str] | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        return (self.of, *([self.against] if self.against else ()), *(self.baselines or ()))


@dataclass(frozen=True, slots=True)
class Scenario:
    title: str
    arms: tuple[Arm, ...]
    columns: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    by_default: bool = True
