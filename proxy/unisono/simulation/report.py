"""Tables and JSON of simulation results, rounded to be the same on all machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from unisono.simulation.plan import SimulationPlan
from unisono.simulation.results import StrategyResult, Times

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
        "wait_s": _times(result.wait),
        "first_token_s": _times(result.first_token),
        "whole_s": _times(result.answer_times),
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


def _times(of: Times) -> dict[str, float]:
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
