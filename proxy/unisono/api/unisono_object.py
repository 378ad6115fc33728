"""The `unisono` object of an answer: recoveries, failovers, backend and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from unisono.core.quotas import QuotaStatus
from unisono.engine.request import GenerationReport


def to_recoveries(reports: Sequence[GenerationReport]) -> list[str]:
    """Return the rule names of all choices, each once, in order of first occurrence."""
    return list(dict.fromkeys(rule for report in reports for rule in report.recoveries))


def to_backend(reports: Sequence[GenerationReport]) -> str:
    names = [name for report in reports for name in report.facts.part_backends or (report.backend,) if name]
    return ", ".join(dict.fromkeys(names))


def _models(reports: Sequence[GenerationReport]) -> tuple[str, str]:
    """Return the requested model, and the models that answered."""
    answered = [report for report in reports if report.served_model]
    served = dict.fromkeys(report.served_model for report in answered)
    return next((report.model for report in answered), ""), ", ".join(served)


def _failovers(reports: Sequence[GenerationReport]) -> int:
    return sum(report.failovers for report in reports)


def to_about(reports: Sequence[GenerationReport], notes: Sequence[str]) -> dict[str, Any]:
    """Return the `unisono` object.

    `left_out` counts the oldest messages that exceeded the context. `unmet` names a requirement that was not met.
    `hooks` holds the values that hooks add.
    """
    about: dict[str, Any] = {
        "recoveries": to_recoveries(reports),
        "failovers": _failovers(reports),
        "backend": to_backend(reports),
    }
    model, served = _models(reports)
    if served != model:
        about["served_model"] = served
    if left_out := max((report.facts.left_out for report in reports), default=0):
        about["left_out"] = left_out
    if unmet := " ".join(dict.fromkeys(report.unmet for report in reports if report.unmet)):
        about["unmet"] = unmet
    if hooks := _hooks(reports):
        about["hooks"] = hooks
    every = [*notes, *dict.fromkeys(note for report in reports for note in report.notes)]
    return about | {"notes": every} if every else about


def _hooks(reports: Sequence[GenerationReport]) -> dict[str, Any]:
    """Return the values of hooks by name; for several choices a list per name."""
    if len(reports) == 1:
        return dict(reports[0].hooks)
    names = dict.fromkeys(name for report in reports for name in report.hooks)
    return {name: [report.hooks.get(name) for report in reports] for name in names}


def backend_header(reports: Sequence[GenerationReport]) -> Mapping[str, str]:
    """Return the headers on backend, model, failovers and quotas.

    In a stream they contain the facts known so far.
    """
    backend, failovers = to_backend(reports), _failovers(reports)
    headers = {"x-unisono-backend": _header_text(backend)} if backend else {}
    model, served = _models(reports)
    if served:
        headers |= {"x-unisono-model": _header_text(model), "x-unisono-served-model": _header_text(served)}
    status = next((report.standing for report in reversed(reports) if report.standing is not None), None)
    limits = {} if status is None else limit_headers(status)
    return headers | ({"x-unisono-failovers": str(failovers)} if failovers else {}) | limits


def limit_headers(status: QuotaStatus) -> dict[str, str]:
    """Return OpenAI's rate limit headers: limits per minute, and what remains."""
    headers: dict[str, str] = {}
    for name, limit, remaining, reset_s in status.windows():
        headers[f"x-ratelimit-limit-{name}"] = str(limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(remaining)
        headers[f"x-ratelimit-reset-{name}"] = _duration(reset_s)
    return headers


def _duration(seconds: float) -> str:
    """Format a duration as OpenAI does: `850ms`, `6s`, `1m1s`."""
    if 0 < seconds < 1:
        return f"{ceil(seconds * 1000)}ms"
    minutes, rest = divmod(ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def recoveries_header(reports: Sequence[GenerationReport]) -> Mapping[str, str]:
    recoveries = to_recoveries(reports)
    return {"x-unisono-recoveries": _header_text(",".join(recoveries))} if recoveries else {}


def _header_text(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)
