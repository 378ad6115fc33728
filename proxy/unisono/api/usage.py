"""Route `GET /v1/usage`: the usage of the caller's own key, by day and model."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from unisono.api.whole import to_whole
from unisono.core.access import Caller
from unisono.core.quotas import MILLION, Account, LedgerLine, TokenUsage
from unisono.errors import InvalidRequest

# Default number of days.
DAYS: Final = 30
DAY: Final = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)

Ledger = Callable[[str, str, Account | None], Awaitable[tuple[LedgerLine, ...]]]


def to_used(used: TokenUsage) -> dict[str, Any]:
    """Return the usage object; `cost_usd` is exact to a millionth."""
    return {
        "requests": used.requests,
        "errors": used.errors,
        "input_tokens": used.input,
        "input_cached_tokens": used.cached,
        "output_tokens": used.output,
        "reasoning_tokens": used.reasoning,
        "total_tokens": used.tokens,
        "cost_usd": used.cost / MILLION,
    }


def to_usage(caller: Caller, since: str, until: str, entries: tuple[LedgerLine, ...]) -> dict[str, Any]:
    """Return the response: totals, and one entry per day and model."""
    return {
        "object": "usage",
        "key": caller.key or None,
        "since": since,
        "until": until,
        "total": to_used(sum((entry.used for entry in entries), TokenUsage())),
        "data": [
            {"date": entry.day, "model": entry.model, "served_model": entry.served_model, **to_used(entry.used)}
            for entry in entries
        ],
    }


def day_of(request: Request, name: str, default: str) -> str:
    """Return a day of the query. Raises InvalidRequest."""
    given = request.query_params.get(name)
    if given is None:
        return default
    # The pattern is checked too, because `fromisoformat` accepts other forms.
    if DAY.fullmatch(given) is not None:
        with suppress(ValueError):
            return date.fromisoformat(given).isoformat()
    raise InvalidRequest(f"'{name}' must be a date of the form YYYY-MM-DD.", param=name)


def usage_router(*, ledger: Ledger, clock: Callable[[], float]) -> APIRouter:
    """Return the router. `clock` returns seconds since 1970.

    The layers of `api.asgi_layers` must run first.
    """

    async def usage(request: Request) -> Response:
        caller: Caller = request.state.caller
        now = datetime.fromtimestamp(clock(), UTC).date()
        since = day_of(request, "since", (now - timedelta(days=DAYS - 1)).isoformat())
        until = day_of(request, "until", now.isoformat())
        entries = await ledger(since, until, Account(caller.tenant, caller.key))
        return to_whole(to_usage(caller, since, until, entries))

    router = APIRouter()
    for path in ("/v1/usage", "/usage"):
        router.add_route(path, usage, methods=["GET"], name="usage")
    return router
