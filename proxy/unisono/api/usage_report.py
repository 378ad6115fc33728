"""Route `GET /v1/usage`: the usage of the caller's own key, by day and model."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, date, datetime
from typing import Annotated, Any, Final, Literal

from fastapi import Depends, Query
from pydantic import BeforeValidator, WithJsonSchema

from unisono.api.answer_types import ABSENT, AnswerModel, Count
from unisono.api.dependencies import CurrentCaller, check_query, provided
from unisono.api.field_types import invalid_field
from unisono.api.route_table import RouteTable
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.quotas import MILLION, Account, LedgerLine, TokenUsage
from unisono.errors import InvalidRequest

USAGE = RouteTable("gateway")
# Default number of days.
DAYS: Final = 30
DAY: Final = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)

Ledger = Callable[[str, str, Account | None], Awaitable[tuple[LedgerLine, ...]]]


@dataclass(frozen=True, slots=True)
class UsageSource:
    """Reader of stored usage records. `clock` returns the Unix time in seconds."""

    ledger: Ledger
    clock: Callable[[], float]


def _to_day(value: Any) -> str:
    # The pattern is checked too, because `fromisoformat` accepts other forms.
    if DAY.fullmatch(value) is not None:
        with suppress(ValueError):
            return date.fromisoformat(value).isoformat()
    raise invalid_field("must be a date of the form YYYY-MM-DD")


Day = Annotated[str, WithJsonSchema({"type": "string", "format": "date"})]
QueriedDay = Annotated[Day, BeforeValidator(_to_day)]


class Used(AnswerModel):
    """Token usage; `cost_usd` is exact to a millionth."""

    requests: Count
    errors: Count
    input_tokens: Count
    input_cached_tokens: Count
    output_tokens: Count
    reasoning_tokens: Count
    total_tokens: Count
    cost_usd: float


class UsageGroup(AnswerModel):
    date: Day
    model: str
    served_model: str


class UsageEntry(Used, UsageGroup):
    """Usage of one day, requested model and answering model."""


class UsageReport(AnswerModel):
    object: Literal["usage"]
    key: str | None
    since: Day
    until: Day
    total: Used
    data: list[UsageEntry]


def to_usage_fields(used: TokenUsage) -> dict[str, Any]:
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


def to_usage(caller: Caller, since: str, until: str, entries: tuple[LedgerLine, ...]) -> UsageReport:
    """Return the response: totals, and one entry per day and model."""
    return UsageReport(
        object="usage",
        key=caller.key or None,
        since=since,
        until=until,
        total=Used(**to_usage_fields(sum((entry.used for entry in entries), TokenUsage()))),
        data=[
            UsageEntry(
                date=entry.day, model=entry.model, served_model=entry.served_model, **to_usage_fields(entry.used)
            )
            for entry in entries
        ],
    )


@USAGE.add("GET", "/usage", dependencies=[Depends(check_query)])
async def get_usage(
    source: Annotated[UsageSource, provided(UsageSource)],
    caller: CurrentCaller,
    since: Annotated[QueriedDay, Query(description="First day (UTC).")] = ABSENT,
    until: Annotated[QueriedDay, Query(description="Last day (UTC), inclusive.")] = ABSENT,
) -> UsageReport:
    """Return the usage of the key by day and model."""
    today = datetime.fromtimestamp(source.clock(), UTC).date().isoformat()
    until = until or max(today, since or today)
    # An early `until` must not lead to a day before the first day of the calendar.
    before = max(date.fromisoformat(until).toordinal() - (DAYS - 1), 1)
    since = since or date.fromordinal(before).isoformat()
    if until < since:
        raise InvalidRequest("Invalid value for 'until': must not be before 'since'.", param="until")
    entries = await source.ledger(since, until, Account(caller.tenant, caller.key))
    return to_usage(caller, since, until, entries)
