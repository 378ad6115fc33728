"""Results of a simulation: outcome of every request, and the figures derived from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from unisono.simulation.traffic import US


class SimulatedEnd(StrEnum):
    DONE = "done"
    # Refused: the queue was full.
    FULL = "full"
    # Refused: no slot became free in time.
    LATE = "late"


@dataclass(slots=True)
class SimulatedRequest:
    """Outcome of one request.

    Times are in microseconds from the start of the simulation, or -1 if the event did not occur. `prompt` and `cached`
    are total tokens of all prompts that were read for the request. If its backend fails, the prompt is read and counted
    again.
    """

    key: int
    arrived_us: int
    output: int
    placed_us: int = -1
    entered_us: int = -1
    first_us: int = -1
    ended_us: int = -1
    prompt: int = 0
    cached: int = 0
    # Number of moves to another backend after a failure.
    moved: int = 0
    # Index of the backend that finished the request.
    backend: int = -1
    end: SimulatedEnd | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """Load of one backend.

    `share` is the fraction of all finished requests that this backend finished. `busy` is the fraction of the time in
    which it worked.
    """

    name: str
    requests: int
    share: float
    busy: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Times:
    """Mean and percentiles of durations in seconds."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(slots=True)
class StrategyResult:
    """Result of one strategy. `requests` lists all requests in order of arrival."""

    strategy: str
    requests: list[SimulatedRequest]
    names: Sequence[str]
    busy_us: Sequence[int]
    lasted_us: int
    _done: list[SimulatedRequest] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._done = [each for each in self.requests if each.end is SimulatedEnd.DONE]

    @property
    def done(self) -> int:
        return len(self._done)

    @property
    def refused(self) -> int:
        return len(self.requests) - len(self._done)

    @property
    def moved(self) -> int:
        """Number of times that an answer was continued on a different backend."""
        return sum(each.moved for each in self.requests)

    @property
    def hit_rate(self) -> float:
        """Fraction of all prompt tokens that were cached."""
        return _rate(self.requests)

    @property
    def wait(self) -> Times:
        """Time from a request's arrival until its backend started it.

        The time includes both queues: that of the gateway and that of the backend.
        """
        return times(each.entered_us - each.arrived_us for each in self._done)

    @property
    def first_token(self) -> Times:
        return times(each.first_us - each.arrived_us for each in self._done)

    @property
    def answer_times(self) -> Times:
        return times(each.ended_us - each.arrived_us for each in self._done)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all finished requests, per second of the simulation."""
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
    """Return the mean and the nearest-rank percentiles in seconds, or zeros for no durations."""
    ordered = sorted(durations_us)
    if not ordered:
        return Times(0.0, 0.0, 0.0, 0.0)
    p50, p95, p99 = (ordered[-(-len(ordered) * percent // 100) - 1] / US for percent in (50, 95, 99))
    return Times(sum(ordered) / len(ordered) / US, p50, p95, p99)


def _rate(requests: Sequence[SimulatedRequest]) -> float:
    prompt = sum(each.prompt for each in requests)
    return sum(each.cached for each in requests) / prompt if prompt else 0.0
