"""The `unisono` object: how an answer came to be, told beside it on every surface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.engine.turn import Report


def to_recoveries(reports: Sequence[Report]) -> list[str]:
    """Rule names of every choice, each once, in order of first occurrence."""
    return list(dict.fromkeys(rule for report in reports for rule in report.recoveries))


def to_backend(reports: Sequence[Report]) -> str:
    return ", ".join(dict.fromkeys(report.backend for report in reports if report.backend))


def to_about(reports: Sequence[Report], notes: Sequence[str]) -> dict[str, Any]:
    """The `unisono` object: how the answer came to be."""
    about: dict[str, Any] = {
        "recoveries": to_recoveries(reports),
        "failovers": sum(report.failovers for report in reports),
        "backend": to_backend(reports),
    }
    return about | {"notes": list(notes)} if notes else about
