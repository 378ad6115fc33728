"""Results of a simulation: outcome of every request, derived figures, tables and JSON.

The numbers in tables and JSON are rounded, so that they are the same on all machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from unisono.simulation.plan import SimulationPlan
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


COLUMNS: Sequence[tuple[str, Callable[[StrategyResult], str]]] = (
    ("prefix hits", lambda r: f"{r.hit_rate:.1%}"),
    ("wait p50", lambda r: _seconds(r.wait.p50)),
    ("wait p99", lambda r: _seconds(r.wait.p99)),
    ("first p50", lambda r: _seconds(r.first_token.p50)),
    ("first p95", lambda r: _seconds(r.first_token.p95)),
    ("first p99", lambda r: _seconds(r.first_token.p99)),
    ("whole p50", lambda r: _seconds(r.answer_times.p50)),
    ("whole p99", lambda r: _seconds(r.answer_times.p99)),
    ("tokens/s", lambda r: f"{r.tokens_per_s:.0f}"),
    ("moved", lambda r: str(r.moved)),
    ("refused", lambda r: str(r.refused)),
)


def to_table(plan: SimulationPlan, results: Sequence[StrategyResult]) -> list[str]:
    """Return table lines: one row per strategy, then one per backend with its share of the work."""
    first = results[0]
    counts = {len(result.requests) for result in results}
    requests = str(counts.pop()) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    rows = [["STRATEGY", *(name for name, _ in COLUMNS)]]
    rows += [[result.strategy, *(cell(result) for _, cell in COLUMNS)] for result in results]
    lines = [
        f"{requests} requests in {first.lasted_us / 60e6:.1f} simulated minutes, seed {plan.seed}; times in seconds",
        "",
        *_aligned(rows),
        "",
    ]
    rows = [["BACKEND", *(f"{result.strategy}: requests, busy, hits" for result in results)]]
    for index, name in enumerate(first.names):
        uses = [result.uses[index] for result in results]
        rows.append([name, *(f"{use.share:6.1%} {use.busy:6.1%} {use.hit_rate:6.1%}" for use in uses)])
    return [*lines, *_aligned(rows)]


def to_json(plan: SimulationPlan, results: Sequence[StrategyResult]) -> dict[str, object]:
    return {"seed": plan.seed, "strategies": {result.strategy: _metrics(result) for result in results}}


def _metrics(result: StrategyResult) -> Mapping[str, object]:
    return {
        "requests": len(result.requests),
        "done": result.done,
        "refused": result.refused,
        "moved": result.moved,
        "lasted_s": round(result.lasted_us / 1e6, 3),
        "prefix_hit_rate": round(result.hit_rate, 4),
        "tokens_per_s": round(result.tokens_per_s, 1),
        "wait_s": _time_fields(result.wait),
        "first_token_s": _time_fields(result.first_token),
        "whole_s": _time_fields(result.answer_times),
        "backends": [
            {
                "name": use.name,
                "requests": use.requests,
                "share": round(use.share, 4),
                "busy": round(use.busy, 4),
                "prefix_hit_rate": round(use.hit_rate, 4),
            }
            for use in result.uses
        ],
    }


def _time_fields(of: Times) -> dict[str, float]:
    return {"mean": round(of.mean, 3), "p50": round(of.p50, 3), "p95": round(of.p95, 3), "p99": round(of.p99, 3)}


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
