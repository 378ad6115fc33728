"""What can be measured, as data: the kinds of work, an arm of a comparison, what is compared, and a scenario of it."""

from __future__ import annotations

from dataclasses import dataclass

from bench.fake_vllm import Pace
from bench.load import ColdPrompts

FULL_SPEED = Pace()


@dataclass(frozen=True, slots=True)
class PriorTurns:
    """What requests of responses continue: see `bench.pasts`. Each of `count` pasts is continued by as many of them."""

    variant: str
    turns: int
    count: int


@dataclass(frozen=True, slots=True)
class Work:
    """A load without its address."""

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
    wire: str = ""
    """Which of a contender's wires, where it is not its first."""
    prior: PriorTurns | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """A process of its own, from nothing to its first healthy answer and its end; meanwhile, with `held`, so many
    streams at once."""

    memory_load: Work | BackgroundWork | None = None


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """Responses in the background: see `bench.background`."""

    streams: int
    watched: int
    tokens: int
    spread_s: float
    pace: Pace


@dataclass(frozen=True, slots=True)
class RenderWork:
    """A conversation rendered without a server: see `bench.renders`."""

    variant: str
    words: int
    times: int


@dataclass(frozen=True, slots=True)
class ToolLoopWork:
    """Turns in which tools are called: see `bench.loops`."""

    streams: int
    requests: int
    words: int


@dataclass(frozen=True, slots=True)
class InterventionWork:
    """Answers as they were asked for, without a server: see `bench.moves`."""

    variant: str
    times: int


@dataclass(frozen=True, slots=True)
class SelectionWork:
    """A deployment chosen among many, without a server: see `bench.choosing`."""

    variant: str
    times: int


@dataclass(frozen=True, slots=True)
class FailoverWork:
    """Streams that break off and go on elsewhere: see `bench.breaks`."""

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
    """`column` of the arm `of` against that of the arm `against`: their ratio, or their difference, and the most it
    may be; with `at_least`, the least. `less` names an arm for each whose value is taken off first: what is compared
    then is what they add. Without `against` it is the value itself."""

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
