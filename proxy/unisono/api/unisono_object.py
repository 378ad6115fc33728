"""The `unisono` object of an answer: recoveries, failovers, backend and notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.core.frozen import dataclass
from unisono.engine.request import GenerationReport


def to_recoveries(reports: Sequence[GenerationReport]) -> list[str]:
    """Return the rule names of all choices, each once, in order of first occurrence."""
    recoveries: dict[str, None] = {}
    for report in reports:
        recoveries.update(dict.fromkeys(report.recoveries))
    return list(recoveries)


@dataclass(frozen=True, slots=True)
class AnswerOrigin:
    """Requested model, backends and models that answered, and number of failovers."""

    backend: str
    model: str
    served_model: str
    failovers: int


def answer_origin(reports: Sequence[GenerationReport]) -> AnswerOrigin:
    """Return the origin of an answer with one or several choices.

    The names of backends and models occur once each, in order of first occurrence.
    """
    backends: dict[str, None] = {}
    served: dict[str, None] = {}
    model, failovers = "", 0
    for report in reports:
        backends.update(dict.fromkeys(report.facts.part_backends or (report.backend,)))
        if answered := report.served_model:
            model = model if served else report.model
            served[answered] = None
        failovers += report.failovers
    return AnswerOrigin(", ".join(filter(None, backends)), model, ", ".join(served), failovers)


def to_about(reports: Sequence[GenerationReport], notes: Sequence[str]) -> dict[str, Any]:
    """Return the `unisono` object.

    Its field `left_out` is the number of oldest items that were left out because the prompt, or the request for a
    summary, exceeded the context window. `unmet` names the requirements that the answer does not meet. `hooks` holds
    the values that hooks add.
    """
    origin = answer_origin(reports)
    about: dict[str, Any] = {
        "recoveries": to_recoveries(reports),
        "failovers": origin.failovers,
        "backend": origin.backend,
    }
    if origin.served_model != origin.model:
        about["served_model"] = origin.served_model
    left_out = 0
    unmet: dict[str, None] = {}
    report_notes: dict[str, None] = {}
    for report in reports:
        left_out = max(left_out, report.facts.left_out)
        if report.unmet:
            unmet[report.unmet] = None
        report_notes.update(dict.fromkeys(report.notes))
    if left_out:
        about["left_out"] = left_out
    if unmet:
        about["unmet"] = " ".join(unmet)
    if hooks := _hooks(reports):
        about["hooks"] = hooks
    if notes or report_notes:
        about["notes"] = [*notes, *report_notes]
    return about


def _hooks(reports: Sequence[GenerationReport]) -> dict[str, Any]:
    """Return the values of hooks by name; with several choices, a list with a value per choice."""
    if len(reports) == 1:
        return dict(reports[0].hooks)
    names = dict.fromkeys(name for report in reports for name in report.hooks)
    return {name: [report.hooks.get(name) for report in reports] for name in names}
