"""Store protocol for request records, with counts by minute and hour for plots."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple, Protocol

from unisono.core.frozen import dataclass
from unisono.core.request_record import RequestRecord

MINUTE_S: Final = 60
HOUR_S: Final = 3600
# Lifetime of counts, by the length of their interval in seconds.
COUNTS_KEPT_S: Final = {MINUTE_S: 2 * 86_400, HOUR_S: 60 * 86_400}
# Time after the deletion of a key's records in which no further ones are stored: requests may still be running.
DELETED_S: Final = 86_400
# Maximum number of intervals of an answer.
MAX_POINTS: Final = 1_500
# Maximum number of digits of a time in milliseconds since 1970: a database has integers of 64 bits.
MAX_CURSOR_DIGITS: Final = 15
# Maximum number of records that one query visits.
MAX_VISITED: Final = 20_000

# Upper bounds of the histograms of durations, in seconds. A last bucket is unbounded.
BUCKETS_S: Final = tuple(round(0.005 * 1.4**step, 4) for step in range(34))

# Facet of records that failed, and of records with any recovery.
FAILED: Final = "failed"
RECOVERED: Final = "recovered"


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Conditions on records. All must hold; empty ones do not count.

    `recovery` is the name of a rule, or `any`. `since` and `until` limit the end of a request, in seconds since 1970.
    """

    tenant: str | None = None
    key: str | None = None
    model: str = ""
    deployment: str = ""
    status: int = 0
    failed: bool = False
    recovery: str = ""
    since: float = 0.0
    until: float | None = None

    @property
    def facets(self) -> tuple[str, ...]:
        """Return the facets that a record must have."""
        wanted = [
            *([RECOVERED] if self.recovery == "any" else [f"recovery:{self.recovery}"] if self.recovery else []),
            *([f"status:{self.status}"] if self.status else []),
            *([FAILED] if self.failed else []),
            *([] if self.key is None else [f"key:{self.key}"]),
            *([] if self.tenant is None else [f"tenant:{self.tenant}"]),
            *([f"deployment:{self.deployment}"] if self.deployment else []),
            *([f"model:{self.model}"] if self.model else []),
        ]
        return tuple(wanted)


def facets_of(record: RequestRecord) -> tuple[str, ...]:
    """Return the facets by which a record is found."""
    facets = [f"tenant:{record.tenant}", f"key:{record.key}", f"status:{record.status}"]
    if record.model:
        facets.append(f"model:{record.model}")
    if record.deployment:
        facets.append(f"deployment:{record.deployment}")
    if has_failed(record):
        facets.append(FAILED)
    if record.recoveries:
        facets.append(RECOVERED)
        facets += [f"recovery:{rule}" for rule in record.recoveries]
    return tuple(facets)


def has_failed(record: RequestRecord) -> bool:
    return record.status >= 400 or bool(record.error)


def ended_ms(record: RequestRecord) -> int:
    """Return the end of a request in milliseconds since 1970."""
    return round((record.at + record.duration_s) * 1000)


@dataclass(frozen=True, slots=True)
class RequestPage:
    """Page of records, the latest first.

    `cursor` continues after the last one; None at the end. A page may be short although more follow, because a query
    visits a limited number of records.
    """

    records: tuple[RequestRecord, ...]
    cursor: str | None = None


class CountedGroup(NamedTuple):
    """Requests with a facet in an interval of `step_s` seconds.

    `start` is its beginning in seconds since 1970. `facet` is empty for all requests.
    """

    step_s: int
    start: int
    facet: str


def counts_of(records: Sequence[RequestRecord]) -> dict[CountedGroup, Mapping[str, int]]:
    """Return the counts of these records, in minutes and in hours.

    Consecutive groups with the same requests share one mapping.
    """
    # Records of one minute with the same names are added up first: each group receives only their sums.
    minutes: dict[tuple[int, str, str, str], list[RequestRecord]] = {}
    for record in records:
        minute = ended_ms(record) // (1000 * MINUTE_S) * MINUTE_S
        minutes.setdefault((minute, record.tenant, record.key, record.model), []).append(record)
    counts: dict[CountedGroup, Mapping[str, int]] = {}
    for (minute, *names_of_minute), of_minute in minutes.items():
        sums = _sums_of(of_minute)
        for facet in _count_facets(*names_of_minute):
            for step_s in COUNTS_KEPT_S:
                group = CountedGroup(step_s, minute // step_s * step_s, facet)
                others = counts.get(group)
                counts[group] = sums if others is None else _sum(others, sums)
    return counts


def _sum(some: Mapping[str, int], others: Mapping[str, int]) -> Mapping[str, int]:
    sums = dict(some)
    for name, number in others.items():
        sums[name] = sums.get(name, 0) + number
    return sums


def _sums_of(records: Sequence[RequestRecord]) -> dict[str, int]:
    """Return the counts of records with the same names."""
    durations_s = [record.duration_s for record in records]
    first_token_s = [record.first_token_s for record in records if record.first_token_s is not None]
    sums = {
        "requests": len(records),
        "errors": sum(map(has_failed, records)),
        "recovered": sum([bool(record.recoveries) for record in records]),
        "duration_ms": sum([round(duration_s * 1000) for duration_s in durations_s]),
        "waited_ms": sum([round(record.waited_s * 1000) for record in records]),
    }
    for name in ("input_tokens", "cached_tokens", "output_tokens", "cost"):
        sums[name] = sum(map(attrgetter(name), records))
    for name, values_s in (("duration", durations_s), ("first_token", first_token_s)):
        for bucket, number in Counter(map(partial(bisect_left, BUCKETS_S), values_s)).items():
            sums[f"{name}:{bucket}"] = number
    return {name: number for name, number in sums.items() if number}


def _count_facets(tenant: str, key: str, model: str) -> tuple[str, ...]:
    """Return the facets of a request's counts: every combination that a query may name."""
    owners = ("", f"tenant:{tenant}", f"key:{key}")
    return (*owners, *(f"{owner} model:{model}" for owner in owners)) if model else owners


def count_facet(wanted: RequestFilter) -> str:
    """Return the facet of the counts that fit the tenant, key and model of a filter."""
    # A key belongs to one tenant.
    owner = f"tenant:{wanted.tenant}" if wanted.tenant is not None else ""
    owner = f"key:{wanted.key}" if wanted.key is not None else owner
    return f"{owner} model:{wanted.model}" if wanted.model else owner


def percentile(counts: Mapping[str, int], name: str, share: float) -> float | None:
    """Return the upper bound of the bucket at a share of a histogram; None if it is empty."""
    buckets = [counts.get(f"{name}:{bucket}", 0) for bucket in range(len(BUCKETS_S) + 1)]
    rest = sum(buckets) * share
    if not rest:
        return None
    for bucket, number in enumerate(buckets):
        rest -= number
        if rest <= 0:
            return BUCKETS_S[min(bucket, len(BUCKETS_S) - 1)]
    return BUCKETS_S[-1]


class RequestStore(Protocol):
    """Storage for request records. Every method may raise `StoreUnavailable`."""

    async def keep_requests(self, *records: RequestRecord, for_s: float, most: int) -> None:
        """Store records for `for_s` seconds, and add them to the counts.

        Of more than `most` records, the oldest are dropped. A record with the id of an earlier one is ignored.
        """
        ...

    async def delete_requests(self, key: str, most: int) -> int:
        """Delete at most `most` records of a key, the oldest first, and return their number.

        Counts stay. Records of requests that end within the next day (`DELETED_S`) are not stored.
        """
        ...

    async def request(self, id: str) -> RequestRecord | None: ...

    async def requests(self, wanted: RequestFilter, limit: int, cursor: str = "") -> RequestPage:
        """Return the latest records, or those after `cursor`. Raises ValueError for an invalid one."""
        ...

    async def request_counts(self, wanted: RequestFilter, step_s: int) -> dict[int, dict[str, int]]:
        """Return the counts by the start of each interval from `since` to `until`.

        Only `model` and `key` or `tenant` of the filter apply.
        """
        ...


def to_cursor(ended: int, id: str) -> str:
    return f"{ended}.{id}"


def of_cursor(cursor: str) -> tuple[int, str]:
    """Return the end and the id of the record at a cursor. Raises ValueError."""
    ended, _, id = cursor.partition(".")
    if not id or not ended.isdecimal() or len(ended) > MAX_CURSOR_DIGITS:
        raise ValueError("not a cursor")
    return int(ended), id
