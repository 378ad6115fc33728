"""Tests of budget periods: start and end of the current one."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.quotas import NO_PERIOD, KeyLimits, Period


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


PERIODS = st.sampled_from([Period("day"), Period("month")]) | st.builds(Period, st.just("every"), st.integers(1, 10**7))


@given(PERIODS, st.floats(1e9, 4e9), st.floats(1e9, 4e9))
def test_periods_are_consecutive(period: Period, now: float, since: float) -> None:
    start, end = period.window(now, since)
    assert end is not None
    assert start <= now < end
    assert period.window(end, since)[0] == pytest.approx(end)


def test_limited_is_true_with_at_least_one_limit() -> None:
    assert not KeyLimits(budget_since=5.0, budget_period=Period("day")).limited
    assert KeyLimits(token_budget=1).limited
    assert KeyLimits(rpm=1).limited
