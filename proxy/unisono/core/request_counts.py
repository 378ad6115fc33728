"""Counts of requests by minute and hour, with histograms of durations, for plots."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple

from unisono.core.request_filter import RequestFilter, has_failed
from unisono.core.request_record import RequestRecord
from unisono.core.request_store import ended_ms

MINUTE_S: Final = 60
HOUR_S: Final = 3600
# Lifetime of counts in seconds, by the length of their interval in seconds.
COUNTS_KEPT_S: Final = {MINUTE_S: 2 * 86_400, HOUR_S: 60 * 86_400}
# Maximum number of intervals in the answer to a query.
MAX_POINTS: Final = 1_500

# Upper bounds of the histograms of durations, in seconds. The last bucket has no upper bound.
BUCKETS_S: Final = tuple(round(0.005 * 1.4**step, 4) for step in range(34))


class CountedGroup(NamedTuple):
    """Requests that have a facet and ended in an interval of `step_s` seconds.

    `start` is the beginning of the interval in seconds since 1970. `facet` names a tenant or a key, a model, or both
    (see `count_facet`). The group with an empty `facet` contains all requests of the interval.
    """

    step_s: int
    start: int
    facet: str


def counts_of(records: Sequence[RequestRecord]) -> dict[CountedGroup, Mapping[str, int]]:
    """Return the counts of these records, by minute and by hour.

    Groups that contain the same requests may share one mapping.
    """
    # Records of one minute with the same tenant, key and model are added up first. Then the sums are added to groups.
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
    """Return the counts of these records, without zeros."""
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
    """Return the facets of a request's counts: each combination that a query may name."""
    owners = ("", f"tenant:{tenant}", f"key:{key}")
    return (*owners, *(f"{owner} model:{model}" for owner in owners)) if model else owners


def count_facet(wanted: RequestFilter) -> str:
    """Return the facet of the counts for the tenant, key and model of a filter."""
    # A key belongs to one tenant, so the tenant is not needed if the key is given.
    owner = f"tenant:{wanted.tenant}" if wanted.tenant is not None else ""
    owner = f"key:{wanted.key}" if wanted.key is not None else owner
    return f"{owner} model:{wanted.model}" if wanted.model else owner


def percentile(counts: Mapping[str, int], name: str, share: float) -> float | None:
    """Return the upper bound of the bucket that contains a percentile; None without requests.

    `name` is `duration` or `first_token`. `share` is the percentile divided by 100.
    """
    buckets = [counts.get(f"{name}:{bucket}", 0) for bucket in range(len(BUCKETS_S) + 1)]
    rest = sum(buckets) * share
    if not rest:
        return None
    for bucket, number in enumerate(buckets):
        rest -= number
        if rest <= 0:
            return BUCKETS_S[min(bucket, len(BUCKETS_S) - 1)]
    return BUCKETS_S[-1]
