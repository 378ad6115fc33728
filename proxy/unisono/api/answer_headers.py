"""Response headers: backend, models, number of failovers, recoveries, and rate limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Final

from unisono.api.unisono_object import answer_origin, to_recoveries
from unisono.core.quotas import QuotaStatus
from unisono.engine.request import GenerationReport

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
    if not ((names := "".join(headers.values())).isascii() and names.isprintable()):
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


def _header_text(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)
