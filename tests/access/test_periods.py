"""Tests of budget periods: start and end of the current one."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.budget_period import NO_PERIOD, Period
from unisono.core.quotas import KeyLimits


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


CASES = {
    "no period": (NO_PERIOD, "2026-11-21T01:00", 0.0, (0.0, None)),
    "day": (Period("day"), "2026-11-21T23:59:59", 0.0, (at("2026-11-21"), at("2026-11-22"))),
    "start of a day": (Period("day"), "2026-11-21", 0.0, (at("2026-11-21"), at("2026-11-22"))),
    "month": (Period("month"), "2026-11-21T01:00", 0.0, (at("2026-11-01"), at("2026-12-01"))),
    "last month of a year": (Period("month"), "2026-12-31T23:59:59", 0.0, (at("2026-12-01"), at("2027-01-01"))),
    "short month": (Period("month"), "2028-02-29", 0.0, (at("2028-02-01"), at("2028-03-01"))),
    "last day of a month": (Period("month"), "2026-01-31", 0.0, (at("2026-01-01"), at("2026-02-01"))),
    "24 hours": (
        Period("every", 86_400),
        "2026-11-21T10:00",
        at("2026-11-20T01:15"),
        (at("2026-11-21"), at("2026-11-22")),
    ),
    "week": (Period("every", 7 * 86_400), "2026-11-22T23:00", at("2026-11-19"), (at("2026-11-16"), at("2026-11-23"))),
    "30 days": (Period("every", 30 * 86_400), "2026-02-28", at("2026-01-15"), (at("2026-02-01"), at("2026-03-01"))),
    "3 days": (
        Period("every", 3 * 86_400),
        "2026-11-22T23:00",
        at("2026-11-17T12:00"),
        (at("2026-11-20"), at("2026-11-23")),
    ),
    "hours since creation": (
        Period("every", 3600),
        "2026-11-21T03:10",
        at("2026-11-21T01:15"),
        (at("2026-11-21T02:15"), at("2026-11-21T03:15")),
    ),
    "exactly at the end": (
        Period("every", 60),
        "2026-11-21T01:01",
        at("2026-11-21T01:00"),
        (at("2026-11-21T01:01"), at("2026-11-21T01:02")),
    ),
}


@pytest.mark.parametrize(("period", "now", "since", "window"), CASES.values(), ids=CASES)
def test_period_that_contains_a_time(
    period: Period, now: str, since: float, window: tuple[float, float | None]
) -> None:
    assert period.window(at(now), since) == window


# Periods around a change of the clock: the time zone, a local time, and the local start and end with their offsets.
CHANGES = {
    "day of 23 hours": (Period("day"), "Europe/Berlin", "2026-03-29T04:00+02:00", "2026-03-29T00:00+01:00", 23),
    "day of 25 hours": (
        Period("every", 86_400),
        "Europe/Berlin",
        "2026-10-25T02:30+01:00",
        "2026-10-25T00:00+02:00",
        25,
    ),
    "month with the change": (
        Period("every", 30 * 86_400),
        "America/New_York",
        "2026-03-31T23:59-04:00",
        "2026-03-01T00:00-05:00",
        31 * 24 - 1,
    ),
    "calendar month": (Period("month"), "America/New_York", "2026-11-01T00:30-04:00", "2026-11-01T00:00-04:00", 721),
    "week": (Period("every", 7 * 86_400), "Europe/Berlin", "2026-03-29T23:59+02:00", "2026-03-23T00:00+01:00", 167),
    "no midnight": (Period("day"), "Asia/Beirut", "2026-03-29T12:00+03:00", "2026-03-29T01:00+03:00", 23),
    "two midnights": (Period("day"), "America/Havana", "2026-11-01T00:30-05:00", "2026-11-01T00:00-04:00", 25),
    "east of UTC": (Period("day"), "Asia/Tokyo", "2026-11-21T00:00+09:00", "2026-11-21T00:00+09:00", 24),
}


@pytest.mark.parametrize(("period", "zone", "now", "start", "hours"), CHANGES.values(), ids=CHANGES)
def test_days_begin_at_midnight_of_the_time_zone(period: Period, zone: str, now: str, start: str, hours: int) -> None:
    begins = datetime.fromisoformat(start).timestamp()
    window = period.window(datetime.fromisoformat(now).timestamp(), zone=ZoneInfo(zone))
    assert window == (begins, begins + hours * 3600)


PERIODS = st.sampled_from([Period("day"), Period("month")]) | st.builds(Period, st.just("every"), st.integers(1, 10**7))
PERIODS |= st.builds(Period, st.just("every"), st.integers(1, 40).map(lambda days: days * 86_400))


ZONES = st.sampled_from(["UTC", "Europe/Berlin", "Asia/Beirut", "America/Havana", "Australia/Lord_Howe"]).map(ZoneInfo)


@given(PERIODS, st.floats(1e9, 4e9), st.floats(1e9, 4e9), ZONES)
def test_periods_are_consecutive(period: Period, now: float, since: float, zone: ZoneInfo) -> None:
    start, end = period.window(now, since, zone)
    assert end is not None
    assert start <= now < end
    assert period.window(end, since, zone)[0] == pytest.approx(end)


def test_limited_is_true_with_at_least_one_limit() -> None:
    assert not KeyLimits(budget_since=5.0, budget_period=Period("day")).limited
    assert KeyLimits(token_budget=1).limited
    assert KeyLimits(rpm=1).limited
