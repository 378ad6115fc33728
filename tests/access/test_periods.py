"""Periods of budgets: where the one that is now begins, and the next."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.access import NO_PERIOD, KeyLimits, Period


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


CASES = {
    "for ever": (NO_PERIOD, "2026-11-21T01:00", 0.0, (0.0, None)),
    "a day": (Period("day"), "2026-11-21T23:59:59", 0.0, (at("2026-11-21"), at("2026-11-22"))),
    "its first moment": (Period("day"), "2026-11-21", 0.0, (at("2026-11-21"), at("2026-11-22"))),
    "a month": (Period("month"), "2026-11-21T01:00", 0.0, (at("2026-11-01"), at("2026-12-01"))),
    "the year's last": (Period("month"), "2026-12-31T23:59:59", 0.0, (at("2026-12-01"), at("2027-01-01"))),
    "a short one": (Period("month"), "2028-02-29", 0.0, (at("2028-02-01"), at("2028-03-01"))),
    "its last day": (Period("month"), "2026-01-31", 0.0, (at("2026-01-01"), at("2026-02-01"))),
    "an hour from when it was made": (
        Period("every", 3600),
        "2026-11-21T03:10",
        at("2026-11-21T01:15"),
        (at("2026-11-21T02:15"), at("2026-11-21T03:15")),
    ),
    "exactly at its end": (
        Period("every", 60),
        "2026-11-21T01:01",
        at("2026-11-21T01:00"),
        (at("2026-11-21T01:01"), at("2026-11-21T01:02")),
    ),
}


@pytest.mark.parametrize(("period", "now", "since", "window"), CASES.values(), ids=CASES)
def test_a_moment_lies_in_its_period(
    period: Period, now: str, since: float, window: tuple[float, float | None]
) -> None:
    assert period.window(at(now), since) == window


PERIODS = st.sampled_from([Period("day"), Period("month")]) | st.builds(Period, st.just("every"), st.integers(1, 10**7))


@given(PERIODS, st.floats(1e9, 4e9), st.floats(1e9, 4e9))
def test_every_moment_lies_in_one_period_and_the_next_begins_where_it_ends(
    period: Period, now: float, since: float
) -> None:
    begun, over = period.window(now, since)
    assert over is not None
    assert begun <= now < over
    assert period.window(over, since)[0] == pytest.approx(over)


def test_limits_know_whether_there_is_one() -> None:
    assert not KeyLimits(budget_since=5.0, budget_period=Period("day")).limited
    assert KeyLimits(token_budget=1).limited
    assert KeyLimits(rpm=1).limited
