"""Samples as tables: for the terminal and, the same text, for RESULTS.md."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

from bench.rig import Sample
from bench.scenarios import COLUMNS, Scenario, Verdict

PACKAGES = ("unisono", "uvicorn", "uvloop", "httptools", "aiohttp", "orjson", "openai-harmony", "fastapi", "starlette")
LIMITED = 0.9
"""From here up the fake and the load generator were as busy as they can be."""


@dataclass(frozen=True, slots=True)
class Judged:
    verdict: Verdict
    value: float

    @property
    def met(self) -> bool:
        return self.verdict.aim is None or self.value <= self.verdict.aim

    def line(self) -> str:
        verdict, unit = self.verdict, COLUMNS[self.verdict.column]
        if verdict.difference:
            said = f"{unit}: {verdict.of} - {verdict.against} = **{self.value:+.2f}**"
        else:
            said = f"{unit}: {verdict.of} / {verdict.against} = **{self.value:.2f}**"
        if verdict.aim is None:
            return said
        return f"{said} (aim ≤ {verdict.aim:g}: {'met' if self.met else 'MISSED'})"


def judge(scenario: Scenario, samples: Mapping[str, Sequence[Sample]]) -> list[Judged]:
    """The verdicts whose two arms were both measured: the median of what each round says, since the two arms of one
    round met the same minute."""
    judged = []
    for verdict in scenario.verdicts:
        pairs = zip(samples.get(verdict.of, ()), samples.get(verdict.against, ()), strict=False)
        values = [_compared(verdict, of, against) for of, against in pairs]
        if values:
            judged.append(Judged(verdict, median(values)))
    return judged


def _compared(verdict: Verdict, of: Sample, against: Sample) -> float:
    left, right = float(getattr(of, verdict.column)), float(getattr(against, verdict.column))
    return left - right if verdict.difference else left / right


def table(name: str, scenario: Scenario, samples: Mapping[str, Sequence[Sample]]) -> str:
    """One scenario in Markdown: median and, in brackets, the least and the most of its rounds."""
    heads = ["", *(COLUMNS[column] for column in scenario.columns)]
    lines = [f"## {name}: {scenario.title}", "", _row(heads), _row(["---", *["---:"] * len(scenario.columns)])]
    for arm in scenario.arms:
        rounds = samples.get(arm.label)
        if rounds:
            lines.append(_row([arm.label, *(_cell(rounds, column) for column in scenario.columns)]))
    lines.append("")
    lines.extend(f"- {judged.line()}" for judged in judge(scenario, samples))
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
    return [f"- {label}: limited by the backend and the clients, {busy:.0%} of their CPU"] if busy > LIMITED else []


def machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{_cpu_model()}, {cores} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    )


def versions() -> str:
    return ", ".join(f"{package} {version(package)}" for package in PACKAGES)


def revision() -> str:
    """The commit measured, marked when the tree differs from it; empty outside a checkout."""
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
    return _number(middle) if len(values) == 1 else f"{_number(middle)} ({_number(low)}-{_number(high)})"


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
