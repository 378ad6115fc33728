"""What became of every request of a run, and the figures that are made of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from unisono.simulation.traffic import US


class SimulatedEnd(StrEnum):
    DONE = "done"
    FULL = "full"
    """Refused: the line was full."""
    LATE = "late"
    """Refused: no place became free in time."""


@dataclass(slots=True)
class SimulatedRequest:
    """One request. Moments are microseconds from the beginning, -1 for what never came; `prompt` and `cached` are the
    tokens of every prompt that was read for it, of which there are several when backends died."""

    key: int
    asked_us: int
    output: int
    placed_us: int = -1
    entered_us: int = -1
    first_us: int = -1
    ended_us: int = -1
    prompt: int = 0
    cached: int = 0
    moved: int = 0
    """How often it went on elsewhere because a backend died."""
    backend: int = -1
    """The one that finished it."""
    end: SimulatedEnd | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """How much one backend had to do. `busy` is the part of the time in which it worked, `share` of all requests."""

    name: str
    requests: int
    share: float
    busy: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(slots=True)
class StrategyResult:
    """Of one strategy. `served` holds every request that came, in the order they did."""

    strategy: str
    served: list[SimulatedRequest]
    names: Sequence[str]
    busy_us: Sequence[int]
    lasted_us: int
    _done: list[SimulatedRequest] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._done = [each for each in self.served if each.end is SimulatedEnd.DONE]

    @property
    def done(self) -> int:
        return len(self._done)

    @property
    def refused(self) -> int:
        return len(self.served) - len(self._done)

    @property
    def moved(self) -> int:
        """Answers that went on elsewhere, counted each time."""
        return sum(each.moved for each in self.served)

    @property
    def hit_rate(self) -> float:
        """The part of all prompt tokens that did not have to be read again."""
        return _rate(self.served)

    @property
    def wait(self) -> Times:
        """Until a backend began: in the gateway's line and in the backend's own."""
        return times(each.entered_us - each.asked_us for each in self._done)

    @property
    def first_token(self) -> Times:
        return times(each.first_us - each.asked_us for each in self._done)

    @property
    def whole(self) -> Times:
        return times(each.ended_us - each.asked_us for each in self._done)

    @property
    def tokens_per_s(self) -> float:
        """Generated, all together."""
        return sum(each.output for each in self._done) * US / self.lasted_us if self.lasted_us else 0.0

    @property
    def uses(self) -> list[Use]:
        own: list[list[SimulatedRequest]] = [[] for _ in self.names]
        for each in self._done:
            own[each.backend].append(each)
        return [
            Use(
                name=name,
                requests=len(mine),
                share=len(mine) / len(self._done) if self._done else 0.0,
                busy=busy / self.lasted_us if self.lasted_us else 0.0,
                hit_rate=_rate(mine),
            )
            for name, busy, mine in zip(self.names, self.busy_us, own, strict=True)
        ]


def times(durations_us: Iterable[int]) -> Times:
    """Percentiles by nearest rank; all 0 of nothing."""
    ordered = sorted(durations_us)
    if not ordered:
        return Times(0.0, 0.0, 0.0, 0.0)
    p50, p95, p99 = (ordered[-(-len(ordered) * percent // 100) - 1] / US for percent in (50, 95, 99))
    return Times(sum(ordered) / len(ordered) / US, p50, p95, p99)


def _rate(requests: Sequence[SimulatedRequest]) -> float:
    prompt = sum(each.prompt for each in requests)
    return sum(each.cached for each in requests) / prompt if prompt else 0.0
