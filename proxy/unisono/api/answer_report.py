"""Report of a generation in its answer: the response headers and the `unisono` object.

Both contain the backend, the model that answered, the number of failovers and the recoveries. Only the headers contain
rate limits. Only the object contains notes, unmet requirements, values of hooks and the number of left-out items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, Final
from urllib.parse import quote

from unisono.core.frozen import dataclass
from unisono.core.quotas import QuotaStatus
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


# Characters that header values contain unchanged: printable ASCII without `%`.
_PLAIN: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

LIMIT_HEADERS: Final = tuple(
    f"x-ratelimit-{fact}-{name}" for name in ("requests", "tokens") for fact in ("limit", "remaining", "reset")
)


def backend_header(reports: Sequence[GenerationReport]) -> Mapping[str, str]:
    """Return the headers that report the backend, models, number of failovers and rate limits.

    The headers of a stream report only what is known when the stream begins.
    """
    origin = answer_origin(reports)
    headers = {"x-unisono-backend": origin.backend} if origin.backend else {}
    if origin.served_model:
        headers["x-unisono-model"] = origin.model
        headers["x-unisono-served-model"] = origin.served_model
    if not _is_plain("".join(headers.values())):
        headers = {name: _header_text(value) for name, value in headers.items()}
    if origin.failovers:
        headers["x-unisono-failovers"] = str(origin.failovers)
    for report in reversed(reports):
        if report.standing is not None:
            return headers | limit_headers(report.standing)
    return headers


def limit_headers(status: QuotaStatus) -> dict[str, str]:
    """Return OpenAI's rate limit headers: limits per minute, remainders, and time until reset."""
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


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and "%" not in text


def _header_text(text: str) -> str:
    """Percent-encode `%` and all characters outside printable ASCII, as UTF-8.

    A client can send such a value back, because the gateway decodes the request header `x-unisono-deployment`.
    """
    return text if _is_plain(text) else quote(text, safe=_PLAIN, errors="replace")
