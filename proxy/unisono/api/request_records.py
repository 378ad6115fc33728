"""Routes `GET /v1/requests...`: records of requests, and their counts over time.

The master key and admins see all records. A team admin sees the records of the team, any other key only its own
records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from fastapi import Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from unisono.api.admin.administration import AdminDeps, Administration
from unisono.api.admin.key_lookup import key_id_of
from unisono.api.admin.roles import Actor
from unisono.api.answer_types import ABSENT, AnswerModel, Count
from unisono.api.dependencies import PathId, check_query, provided
from unisono.api.json_response import to_whole
from unisono.api.route_table import READ_404, RouteTable, dependency
from unisono.core.frozen import dataclass
from unisono.core.request_counts import HOUR_S, MAX_POINTS, MINUTE_S, percentile
from unisono.core.request_filter import RequestFilter
from unisono.core.request_record import COST_UNIT, RequestRecord, to_facts
from unisono.core.request_store import RequestStore
from unisono.errors import InvalidRequest, NotFound

REQUESTS = RouteTable("gateway")
LISTED: Final = 20
MAX_LISTED: Final = 200
# Length of the counted range in seconds if `since` is not set.
DEFAULT_RANGE_S: Final = 3600.0
# Fields of the counts that are sums over the requests of an interval.
COUNTED: Final = ("requests", "errors", "recovered", "input_tokens", "cached_tokens", "output_tokens")
# Percentiles of durations in the counts, keyed by name.
SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class RequestSource:
    """Reader of request records, which the store deletes after `kept_s` seconds.

    `clock` returns the Unix time in seconds.
    """

    store: RequestStore
    clock: Callable[[], float]
    kept_s: float


async def _actor(request: Request) -> Actor:
    """Check the query parameters of a request, and return its sender as an Actor with a role.

    Raises UnsupportedValue for an unknown or repeated parameter.
    """
    await check_query(request)
    return await dependency(request, Administration).actor(request.state.caller)


CurrentActor = Annotated[Actor, Depends(_actor)]
Source = Annotated[RequestSource, provided(RequestSource)]
Name = Annotated[str, Query(max_length=256)]
Time = Annotated[float, Query(ge=0, lt=2**40, description="Unix time in seconds.")]


class RequestEntry(AnswerModel):
    id: str
    at: float
    duration_s: float
    status: Count = ABSENT
    method: str = ABSENT
    route: str = ABSENT
    key: str = ABSENT
    model: str = ABSENT


class RequestList(AnswerModel):
    object: Literal["list"]
    data: list[RequestEntry]
    has_more: bool
    next_cursor: str | None


class Percentiles(AnswerModel):
    p50: float | None
    p95: float | None
    p99: float | None


class RequestPoint(AnswerModel):
    """Counts of the requests that ended in the interval that begins at `at` (Unix time)."""

    at: Count
    requests: Count
    errors: Count
    recovered: Count
    input_tokens: Count
    cached_tokens: Count
    output_tokens: Count
    cost: float
    # Sums, over all requests of the interval.
    total_duration_s: float
    total_waited_s: float
    duration_s: Percentiles
    first_token_s: Percentiles


class RequestStats(AnswerModel):
    object: Literal["unisono.request_stats"]
    step_s: Count
    since: float
    until: float
    data: list[RequestPoint]


@REQUESTS.add("GET", "/requests", answer=RequestList)
async def list_requests(
    source: Source,
    admin: AdminDeps,
    actor: CurrentActor,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Maximum number of records.")] = LISTED,
    cursor: Annotated[Name, Query(description="`next_cursor` of the previous page.")] = "",
    key: Annotated[Name, Query(description="Id of a virtual key.")] = ABSENT,
    team: Annotated[Name, Query(description="Team of the key.")] = ABSENT,
    model: Annotated[Name, Query(description="Requested model.")] = "",
    deployment: Annotated[Name, Query(description="Deployment that answered.")] = "",
    status: Annotated[int, Query(ge=100, le=599, description="HTTP status.")] = 0,
    failed: Annotated[bool, Query(description="True lists only requests that failed.")] = False,
    recovery: Annotated[Name, Query(description="Name of a recovery rule, or `any`.")] = "",
    since: Time = 0.0,
    until: Time = ABSENT,
) -> Response:
    """List the latest request records that the key may see.

    A page may be shorter than `limit` although `has_more` is true, because a query visits a limited number of records.
    """
    if until is not None and until < since:
        raise InvalidRequest("Invalid value for 'until': must not be before 'since'.", param="until")
    wanted = RequestFilter(
        key=await key_id_of(admin, key),
        tenant=team,
        model=model,
        deployment=deployment,
        status=status,
        failed=failed,
        recovery=recovery,
        since=max(since, source.clock() - source.kept_s),
        until=until,
    )
    try:
        page = await source.store.requests(visible_to(actor, wanted), limit, cursor)
    except ValueError:
        raise InvalidRequest(
            "Invalid value for 'cursor': must be the 'next_cursor' of an earlier page.", param="cursor"
        ) from None
    data = [to_facts(record) for record in page.records]
    return to_whole({"object": "list", "data": data, "has_more": page.cursor is not None, "next_cursor": page.cursor})


@REQUESTS.add("GET", "/requests/stats")
async def get_request_stats(
    source: Source,
    admin: AdminDeps,
    actor: CurrentActor,
    step: Annotated[Literal["minute", "hour"], Query(description="Length of an interval.")] = ABSENT,
    team: Annotated[Name, Query(description="Team of the key.")] = ABSENT,
    key: Annotated[Name, Query(description="Id of a virtual key.")] = ABSENT,
    model: Annotated[Name, Query(description="Requested model.")] = "",
    since: Time = ABSENT,
    until: Time = ABSENT,
) -> RequestStats:
    """Return counts and times of requests by interval.

    The range is from `since` (by default an hour before `until`) to `until` (by default now). By default, an interval
    is a minute for ranges up to 6 hours, and an hour for longer ranges. Intervals without requests are omitted.
    """
    if None not in (team, key):
        raise InvalidRequest(
            "Invalid value for 'team': 'team' and 'key' cannot be combined; send only one of them.", param="team"
        )
    until = source.clock() if until is None else until
    since = max(0.0, until - DEFAULT_RANGE_S) if since is None else since
    step_s = {"minute": MINUTE_S, "hour": HOUR_S}.get(step, MINUTE_S if until - since <= 6 * HOUR_S else HOUR_S)
    if until < since:
        raise InvalidRequest("Invalid value for 'until': must not be before 'since'.", param="until")
    if (until - since) / step_s > MAX_POINTS:
        raise InvalidRequest(
            f"Invalid value for 'since': at most {MAX_POINTS} intervals are possible; shorten the range"
            f"{', or use step=hour' if step_s == MINUTE_S else ''}.",
            param="since",
        )
    id = await key_id_of(admin, key)
    wanted = visible_to(actor, RequestFilter(key=id, tenant=team, model=model, since=since, until=until))
    points = await source.store.request_counts(wanted, step_s)
    data = [to_point(at, counts) for at, counts in points.items()]
    return RequestStats(object="unisono.request_stats", step_s=step_s, since=since, until=until, data=data)


@REQUESTS.add("GET", "/requests/{id}", READ_404, answer=RequestEntry)
async def get_request(source: Source, actor: CurrentActor, id: PathId) -> Response:
    """Retrieve the record of a request."""
    record = await source.store.request(id)
    if record is None or not _may_see(actor, record):
        raise NotFound("The request does not exist: its record may have expired, or may belong to another key.")
    return to_whole(to_facts(record))


def visible_to(actor: Actor, wanted: RequestFilter) -> RequestFilter:
    """Return the filter restricted to the records that the actor may see.

    If the filter asks for a key or team whose records the actor may not see, the result matches no record.
    """
    if actor.sees_all or (wanted.tenant is not None and wanted.tenant in actor.teams):
        return wanted
    assert actor.key is not None
    if wanted.key not in (None, actor.key.id) or wanted.tenant not in (None, actor.key.tenant):
        # No request ended before 1970.
        return replace(wanted, key=actor.key.id, until=0.0)
    return replace(wanted, key=actor.key.id)


def _may_see(actor: Actor, record: RequestRecord) -> bool:
    is_own = actor.key is not None and record.key == actor.key.id
    return actor.sees_all or is_own or record.tenant in actor.teams


def to_point(at: int, counts: Mapping[str, int]) -> RequestPoint:
    sums: dict[str, Any] = {name: counts.get(name, 0) for name in COUNTED}
    times: dict[str, Any] = {
        f"{name}_s": Percentiles(**{share: percentile(counts, name, part) for share, part in SHARES.items()})
        for name in ("duration", "first_token")
    }
    times.update(
        total_duration_s=counts.get("duration_ms", 0) / 1000,
        total_waited_s=counts.get("waited_ms", 0) / 1000,
    )
    return RequestPoint(at=at, **sums, cost=counts.get("cost", 0) * COST_UNIT, **times)
