"""The `unisono` object: how an answer came to be, told beside it on every surface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.engine.turn import Report


def to_recoveries(reports: Sequence[Report]) -> list[str]:
    """Rule names of every choice, each once, in order of first occurrence."""
    return list(dict.fromkeys(rule for report in reports for rule in report.recoveries))


def to_backend(reports: Sequence[Report]) -> str:
    return ", ".join(dict.fromkeys(report.backend for report in reports if report.backend))


def to_about(reports: Sequence[Report], notes: Sequence[str]) -> dict[str, Any]:
    """The `unisono` object: how the answer came to be. `left_out` counts the oldest turns that were too much, `unmet`
    says what was asked for and could not be had."""
    about: dict[str, Any] = {
        "recoveries": to_recoveries(reports),
        "failovers": sum(report.failovers for report in reports),
        "backend": to_backend(reports),
    }
    if left_out := max((report.left_out for report in reports), default=0):
        about["left_out"] = left_out
    if unmet := " ".join(dict.fromkeys(report.unmet for report in reports if report.unmet)):
        about["unmet"] = unmet
    return about | {"notes": list(notes)} if notes else about


def backend_header(reports: Sequence[Report]) -> Mapping[str, str]:
    backend = to_backend(reports)
    return {"x-unisono-backend": _header_text(backend)} if backend else {}


def recoveries_header(reports: Sequence[Report]) -> Mapping[str, str]:
    recoveries = to_recoveries(reports)
    return {"x-unisono-recoveries": _header_text(",".join(recoveries))} if recoveries else {}


def _header_text(text: str) -> str:
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)
