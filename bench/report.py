"""Markdown tables of samples, for the terminal and RESULTS.md."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import isnan
from pathlib import Path
from random import Random
from statistics import median

from bench import peer_env
from bench.sample import COLUMNS, Sample
from bench.tasks import Scenario, Verdict

PACKAGES = ("unisono", "uvicorn", "uvloop", "httptools", "aiohttp", "orjson", "openai-harmony", "fastapi", "starlette")
# Other gateways with environments of their own.
PEERS = ("litellm", "smg")
# CPU share from which the fake backend and the load generator limit the result.
MAX_RIG_BUSY = 0.9
BOOTSTRAP_SAMPLES = 4_000
# A 95 % interval of a median does not exist for fewer pairs.
MIN_PAIRS = 6


@dataclass(frozen=True, slots=True)
class VerdictResult:
    """Median of a verdict over the rounds; its 95 % interval if there are enough of them."""

    verdict: Verdict
    value: float
    interval: tuple[float, float] | None = None

    @property
    def is_met(self) -> bool:
        aim = self.verdict.aim
        if aim is None:
            return True
        return self.value >= aim if self.verdict.at_least else self.value <= aim

    def line(self) -> str:
        aim = self.aim
        spread = "" if self.interval is None else ", 95 % interval {:.3f} to {:.3f}".format(*self.interval)
        return f"{self.comparison} = **{self.value_text}**{spread}" + (f" (aim {aim}: {self.outcome})" if aim else "")

    @property
    def comparison(self) -> str:
        verdict = self.verdict
        of, against = verdict.of, verdict.against
        if not against:
            return f"{COLUMNS[verdict.column]}: {of}"
        if verdict.baselines is not None:
            of, against = f"({of} - {verdict.baselines[0]})", f"({against} - {verdict.baselines[1]})"
        return f"{COLUMNS[verdict.column]}: {of} {'-' if verdict.difference else '/'} {against}"

    @property
    def value_text(self) -> str:
        return f"{self.value:+.2f}" if self.verdict.difference else f"{self.value:.3g}"

    @property
    def aim(self) -> str:
        """Aim as text, or an empty string without one."""
        verdict = self.verdict
        return "" if verdict.aim is None else f"{'≥' if verdict.at_least else '≤'} {verdict.aim:.3g}"

    @property
    def outcome(self) -> str:
        return "met" if self.is_met else "MISSED"


def judge(scenario: Scenario, samples: Mapping[str, Sequence[Sample]]) -> list[VerdictResult]:
    """Return the verdicts whose arms were all measured, as medians over the rounds.

    Arms are compared within a round, because they ran in the same minute.
    """
    results = []
    for verdict in scenario.verdicts:
        measured = zip(*(samples.get(arm, ()) for arm in verdict.arms), strict=False)
        values = [_compare(verdict, *arms) for arms in measured]
        if values:
            spread = median_interval(values) if len(values) >= MIN_PAIRS else None
            results.append(VerdictResult(verdict, median(values), spread))
    return results


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, from resampled values."""
    rng = Random(1)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(BOOTSTRAP_SAMPLES))
    return medians[round(0.025 * BOOTSTRAP_SAMPLES)], medians[round(0.975 * BOOTSTRAP_SAMPLES) - 1]


def _compare(verdict: Verdict, *arms: Sample) -> float:
    values = [float(getattr(sample, verdict.column)) for sample in arms]
    if not verdict.against:
        return values[0]
    left, right, *baselines = values
    if baselines:
        left, right = left - baselines[0], right - baselines[1]
    return left - right if verdict.difference else left / right


def aims(results: Mapping[str, Sequence[VerdictResult]]) -> str:
    """Return the table of all aims, by scenario."""
    lines = ["## Aims", "", _row(["", "", "aim", "here", ""]), _row(["---", "---", "---:", "---:", "---"])]
    for name, rows in results.items():
        lines += [_row([name, row.comparison, row.aim, row.value_text, row.outcome]) for row in rows if row.aim]
    return "\n".join(lines) + "\n"


def table(name: str, scenario: Scenario, samples: Mapping[str, Sequence[Sample]]) -> str:
    """Return the table of one scenario: medians, with minimum and maximum of the rounds."""
    header = ["", *(COLUMNS[column] for column in scenario.columns)]
    lines = [f"## {name}: {scenario.title}", "", _row(header), _row(["---", *["---:"] * len(scenario.columns)])]
    for arm in scenario.arms:
        rounds = samples.get(arm.label)
        if rounds:
            lines.append(_row([arm.label, *(_cell(rounds, column) for column in scenario.columns)]))
    lines.append("")
    lines.extend(f"- {result.line()}" for result in judge(scenario, samples))
    for label, rounds in samples.items():
        if rounds:
            lines.extend(_faults(label, rounds))
            lines.extend(_limits(label, rounds) if "tokens_per_s" in scenario.columns else ())
    return "\n".join(lines).rstrip() + "\n"


def _faults(label: str, rounds: Sequence[Sample]) -> list[str]:
    faults, examples = sum(r.faults for r in rounds), [e for r in rounds for e in r.examples]
    return [f"- **{label}: {faults} FAULTS**, e.g. {examples[0]}"] if faults else []


def _limits(label: str, rounds: Sequence[Sample]) -> list[str]:
    busy = median(r.rig_busy for r in rounds)
    return (
        [f"- {label}: limited by the backend and the clients, {busy:.0%} of their CPU"] if busy > MAX_RIG_BUSY else []
    )


def machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{_cpu_model()}, {cores} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    )


def versions() -> str:
    return ", ".join([*(f"{package} {version(package)}" for package in PACKAGES), *map(peer_env.version, PEERS)])


def revision() -> str:
    """Return the measured commit, marked if the tree has changes; empty outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return found.stdout.strip()


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        return names[0] if names else platform.machine()
    return platform.processor() or platform.machine()


def _cell(rounds: Sequence[Sample], column: str) -> str:
    values = [float(getattr(sample, column)) for sample in rounds]
    middle, low, high = median(values), min(values), max(values)
    return (
        _number(middle) if len(values) == 1 or isnan(middle) else f"{_number(middle)} ({_number(low)}-{_number(high)})"
    )


def _number(value: float) -> str:
    if isnan(value):
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
