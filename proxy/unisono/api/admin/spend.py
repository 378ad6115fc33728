"""Routes `/spend/*`, `/global/spend/report` and `/user/daily/activity`.

The ledger has totals by key, model and UTC day. Individual requests are in the request records. An actor sees the usage
of those keys that the actor may see. Admins also see the usage of the master key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import Query
from pydantic import Field

from unisono.api.admin.administration import ADMIN, AdminDeps, Administration, CurrentActor
from unisono.api.admin.budget_spend import FIRST_DAY, LAST_DAY, ledger_lines
from unisono.api.admin.key_lookup import key_id_of
from unisono.api.admin.key_schema import team_of
from unisono.api.admin.roles import MASTER_ACTOR, Actor
from unisono.api.admin.spend_logs import MAX_LISTED, day_end, day_start, request_log, request_logs
from unisono.api.answer_types import AnswerModel, Count, Object
from unisono.api.field_types import QueryModel
from unisono.api.usage_report import QueriedDay
from unisono.core.access import KeyRecord
from unisono.core.directory import EntryKind
from unisono.core.frozen import dataclass
from unisono.core.quotas import MILLION, LedgerLine, TokenUsage
from unisono.core.request_filter import RequestFilter
from unisono.errors import InvalidRequest

# Number of days in a report, if the request has no dates.
REPORT_DAYS: Final = 30
# Functions that return the name by which ledger lines are grouped.
day_of: Final = attrgetter("day")
model_of: Final = attrgetter("model")

Row = TypeVar("Row")


class UsageQuery(QueryModel):
    """Filters of the usage. `start_date` and `end_date` are UTC days, and both are inclusive."""

    start_date: QueriedDay | None = None
    end_date: QueriedDay | None = None
    api_key: str | None = None
    user_id: str | None = None
    team_id: str | None = None
    model: str | None = None


class ReportQuery(UsageQuery):
    """Filters of the report. `internal_user_id` is LiteLLM's second name for `user_id`."""

    internal_user_id: str | None = None
    group_by: Literal["team", "api_key"] = "team"


class SpendQuery(UsageQuery):
    """Filters and page of a list of usage."""

    page: Annotated[int, Field(ge=1, le=1_000_000, strict=False)] = 1
    page_size: Annotated[int, Field(ge=1, le=1000, strict=False)] = 50


class LogQuery(SpendQuery):
    """Filters of `/spend/logs`."""

    request_id: str | None = None
    summarize: Annotated[bool, Field(strict=False)] = True


@dataclass(frozen=True, slots=True)
class VisibleUsage:
    """Ledger lines that an actor may see, and the visible keys by id, including deleted keys."""

    lines: Sequence[LedgerLine]
    keys: Mapping[str, KeyRecord]

    def user(self, line: LedgerLine) -> str:
        key = self.keys.get(line.account.key)
        return "" if key is None else key.user

    def team(self, line: LedgerLine) -> str:
        key = self.keys.get(line.account.key)
        return "" if key is None else team_of(key) or ""

    @property
    def total(self) -> TokenUsage:
        return sum((line.used for line in self.lines), TokenUsage())

    def split(self, name: Callable[[LedgerLine], str]) -> dict[str, VisibleUsage]:
        """Return the usage of all lines with the same `name(line)`, sorted by name."""
        lines: dict[str, list[LedgerLine]] = defaultdict(list)
        for line in self.lines:
            lines[name(line)].append(line)
        return {each: VisibleUsage(lines[each], self.keys) for each in sorted(lines)}

    def sums(self, name: Callable[[LedgerLine], str]) -> dict[str, TokenUsage]:
        """Return the total usage of all lines with the same `name(line)`, highest cost first."""
        found = {each: own.total for each, own in self.split(name).items()}
        return dict(sorted(found.items(), key=lambda each: -each[1].cost))


def key_name(line: LedgerLine) -> str:
    """Return the id of the key of a line; for the master key, its name in audit records."""
    return line.account.key or MASTER_ACTOR


async def visible_usage(admin: Administration, actor: Actor, query: UsageQuery) -> VisibleUsage:
    """Return the usage that the actor may see and that matches the query.

    Raises `InvalidRequest` if the last day is before the first.
    """
    _check_days(query)
    api_key = await key_id_of(admin, query.api_key)
    keys = {key.id: key for key in await admin.store.keys() if actor.sees_key(key)}
    usage = VisibleUsage((), keys)
    lines = [
        line
        for line in await ledger_lines(admin, query.start_date or FIRST_DAY, query.end_date or LAST_DAY)
        if (line.account.key in keys or (actor.sees_all and not line.account.key))
        and api_key in (None, key_name(line))
        and query.model in (None, line.model)
        and query.user_id in (None, usage.user(line))
        and query.team_id in (None, usage.team(line))
    ]
    return VisibleUsage(lines, keys)


def _check_days(query: UsageQuery) -> None:
    if query.start_date and query.end_date and query.end_date < query.start_date:
        raise InvalidRequest("'end_date': must not be before 'start_date'.", param="end_date")


def _usd(used: TokenUsage) -> float:
    return used.cost / MILLION


@ADMIN.add("GET", "/spend/logs")
async def list_spend_logs(admin: AdminDeps, actor: CurrentActor, query: Annotated[LogQuery, Query()]) -> list[Object]:
    """Return the spend by day; with `summarize=false` or `request_id`, individual requests."""
    query = query.model_copy(update={"api_key": await key_id_of(admin, query.api_key)})
    if query.request_id is not None:
        _check_days(query)
        return [row for row in await request_log(admin, actor, query.request_id) if _fits(row, query)]
    if not query.summarize:
        return await _single_requests(admin, actor, query)
    usage = await visible_usage(admin, actor, query)
    return [
        {
            **{name: _usd(used) for name, used in own.sums(key_name).items()},
            "startTime": day,
            "spend": _usd(own.total),
            "users": {name: _usd(used) for name, used in own.sums(own.user).items()},
            "models": {name: _usd(used) for name, used in own.sums(model_of).items()},
        }
        for day, own in usage.split(day_of).items()
    ]


def _fits(row: Object, query: LogQuery) -> bool:
    """Return whether the log of a request matches all filters except `request_id`."""
    day = str(row["startTime"])[:10]
    return (
        query.api_key in (None, row["api_key"])
        and query.model in (None, row["model_group"])
        and query.user_id in (None, row["user"])
        and query.team_id in (None, row["team_id"] or "")
        and (query.start_date or FIRST_DAY) <= day <= (query.end_date or LAST_DAY)
    )


async def _single_requests(admin: Administration, actor: Actor, query: SpendQuery) -> list[Object]:
    """Return a page of the requests that the actor may see and that match, the latest first.

    Raises `InvalidRequest` if the last day is before the first, and for a page beyond the latest `MAX_LISTED` requests.
    """
    _check_days(query)
    if query.page * query.page_size > MAX_LISTED:
        raise InvalidRequest(
            f"'page': only the latest {MAX_LISTED:,} requests can be listed; set 'end_date' to list older requests.",
            param="page",
        )
    keys = {key.id: key for key in await admin.store.keys() if actor.sees_key(key)}
    only: set[str] | None = None
    if not actor.sees_all or query.user_id is not None or query.team_id is not None:
        matches = (
            key.id
            for key in keys.values()
            if query.user_id in (None, key.user) and query.team_id in (None, team_of(key) or "")
        )
        only = set(matches)
    if query.api_key is not None:
        named = "" if query.api_key == MASTER_ACTOR else query.api_key
        only = {named} if only is None or named in only else set()
    wanted = RequestFilter(
        model=query.model or "",
        since=day_start(query.start_date) if query.start_date else 0.0,
        until=day_end(query.end_date) if query.end_date else None,
    )
    rows = await request_logs(admin, keys, only, wanted, query.page * query.page_size)
    return _page(rows, query)


@ADMIN.add("GET", "/spend/keys")
async def list_spend_by_key(
    admin: AdminDeps, actor: CurrentActor, query: Annotated[SpendQuery, Query()]
) -> list[Object]:
    """Return a page of the keys with their spend, highest spend first."""
    usage = await visible_usage(admin, actor, query)
    sums = usage.sums(key_name)
    keys = [key for key in usage.keys.values() if key.revoked_at is None or key.id in sums]
    rows: list[Object] = [{**admin.view(key), "spend": _usd(sums.get(key.id, TokenUsage()))} for key in keys]
    if MASTER_ACTOR in sums:
        rows.append({"token": MASTER_ACTOR, "key_alias": None, "spend": _usd(sums[MASTER_ACTOR])})
    return _page(sorted(rows, key=lambda row: -row["spend"]), query)


@ADMIN.add("GET", "/spend/users")
async def list_spend_by_user(
    admin: AdminDeps, actor: CurrentActor, query: Annotated[SpendQuery, Query()]
) -> list[Object]:
    """Return a page of the users with their spend, highest spend first."""
    usage = await visible_usage(admin, actor, query)
    sums = usage.sums(usage.user)
    users = [user for user in await admin.store.directory(EntryKind.USER) if actor.sees(user)]
    rows: list[Object] = [
        {**admin.view(user), "spend": _usd(sums.get(user.id, TokenUsage()))}
        for user in users
        if query.user_id in (None, user.id)
    ]
    return _page(sorted(rows, key=lambda row: -row["spend"]), query)


def _page(rows: list[Row], query: SpendQuery) -> list[Row]:
    start = (query.page - 1) * query.page_size
    return rows[start : start + query.page_size]


@ADMIN.add("GET", "/spend/tags")
async def list_spend_by_tag(
    admin: AdminDeps, actor: CurrentActor, query: Annotated[SpendQuery, Query()]
) -> list[Object]:
    """Return a page of key tags, each with its spend, highest spend first."""
    usage = await visible_usage(admin, actor, query)
    sums: dict[str, TokenUsage] = defaultdict(TokenUsage)
    for line in usage.lines:
        key = usage.keys.get(line.account.key)
        tags = admin.view(key)["tags"] if key is not None else []
        for tag in dict.fromkeys(map(str, tags if isinstance(tags, list) else [])):
            sums[tag] += line.used
    rows: list[Object] = [
        {"individual_request_tag": tag, "log_count": used.requests, "total_spend": _usd(used)}
        for tag, used in sorted(sums.items(), key=lambda each: (-each[1].cost, each[0]))
    ]
    return _page(rows, query)


@ADMIN.add("GET", "/global/spend/report")
async def get_spend_report(
    admin: AdminDeps, actor: CurrentActor, query: Annotated[ReportQuery, Query()]
) -> list[Object]:
    """Return the spend of teams by day, or the spend of keys with `group_by=api_key`."""
    if query.internal_user_id is not None:
        query = query.model_copy(update={"user_id": query.internal_user_id})
    usage = await visible_usage(admin, actor, _with_days(query, admin.clock()))
    if query.group_by == "api_key":
        keys = usage.split(key_name)
        return [_key_report(name, keys[name]) for name in usage.sums(key_name)]
    return [
        {"group_by_day": day, "teams": [_team_report(*each) for each in own.split(own.team).items()]}
        for day, own in usage.split(day_of).items()
    ]


def _with_days(query: UsageQuery, now: float) -> UsageQuery:
    """Return the query with its missing days set: by default, the last 30 days including today."""
    today = datetime.fromtimestamp(now, UTC).date()
    first = (today - timedelta(days=REPORT_DAYS - 1)).isoformat()
    days = {"start_date": query.start_date or first, "end_date": query.end_date or today.isoformat()}
    return query.model_copy(update=days)


def _team_report(team: str, usage: VisibleUsage) -> Object:
    return {
        "team_name": team or "unassigned",
        "total_spend": _usd(usage.total),
        "metadata": [
            {
                "model": line.model,
                "spend": _usd(line.used),
                "total_tokens": line.used.tokens,
                "api_key": key_name(line),
            }
            for line in usage.lines
        ],
    }


def _key_report(name: str, usage: VisibleUsage) -> Object:
    return {
        "api_key": name,
        **_totals(usage.total),
        "model_details": [{"model": model, **_totals(used)} for model, used in usage.sums(model_of).items()],
    }


def _totals(used: TokenUsage) -> Object:
    return {"total_cost": _usd(used), "total_input_tokens": used.input, "total_output_tokens": used.output}


class DailyActivity(AnswerModel):
    results: list[Object]
    metadata: Object


class ActivityMetrics(AnswerModel):
    """Usage in LiteLLM's format."""

    spend: float
    prompt_tokens: Count
    completion_tokens: Count
    cache_read_input_tokens: Count
    # Always 0: the ledger does not contain the tokens that backends add to their caches.
    cache_creation_input_tokens: Count = 0
    reasoning_tokens: Count
    total_tokens: Count
    successful_requests: Count
    failed_requests: Count
    api_requests: Count


def to_metrics(used: TokenUsage) -> dict[str, Any]:
    return ActivityMetrics(
        spend=_usd(used),
        prompt_tokens=used.input,
        completion_tokens=used.output,
        cache_read_input_tokens=used.cached,
        reasoning_tokens=used.reasoning,
        total_tokens=used.tokens,
        successful_requests=max(used.requests - used.errors, 0),
        failed_requests=used.errors,
        api_requests=used.requests,
    ).model_dump()


def from_metrics(metrics: Mapping[str, Any]) -> TokenUsage:
    """Return the usage from which `to_metrics` made these metrics."""
    shown = ActivityMetrics.model_validate(metrics)
    return TokenUsage(
        requests=shown.api_requests,
        errors=shown.failed_requests,
        input=shown.prompt_tokens,
        cached=shown.cache_read_input_tokens,
        output=shown.completion_tokens,
        reasoning=shown.reasoning_tokens,
        cost=round(shown.spend * MILLION),
    )


@ADMIN.add("GET", "/user/daily/activity")
async def get_daily_activity(
    admin: AdminDeps, actor: CurrentActor, query: Annotated[SpendQuery, Query()]
) -> DailyActivity:
    """Return the usage by day, newest first, each day with its usage by model and key."""
    usage = await visible_usage(admin, actor, _with_days(query, admin.clock()))
    days = [*reversed(usage.split(day_of).items())]
    total = to_metrics(usage.total)
    pages = max(-(-len(days) // query.page_size), 1)
    counts = {"page": query.page, "total_pages": pages, "has_more": query.page < pages}
    totals = {f"total_{name.removeprefix('total_')}": each for name, each in total.items()}
    return DailyActivity(results=[_day(*each) for each in _page(days, query)], metadata=totals | counts)


def _day(day: str, usage: VisibleUsage) -> Object:
    return {
        "date": day,
        "metrics": to_metrics(usage.total),
        "breakdown": {
            "models": {
                name: {"metrics": to_metrics(used), "metadata": {}} for name, used in usage.sums(model_of).items()
            },
            "api_keys": {
                name: {"metrics": to_metrics(used), "metadata": _about_key(usage.keys.get(name))}
                for name, used in usage.sums(key_name).items()
            },
        },
    }


def _about_key(key: KeyRecord | None) -> Object:
    if key is None:
        return {"key_alias": None, "team_id": None, "user_id": None}
    return {"key_alias": key.name or None, "team_id": team_of(key), "user_id": key.user or None}
