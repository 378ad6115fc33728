"""Rate window of one minute: tables of cases, and properties of any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.routing.deployment_rate_limits import GRAINS, MINUTE_S, Rate

GRAIN_S = MINUTE_S / GRAINS

ROOM: dict[str, tuple[Rate, list[tuple[float, int]], float, int, bool]] = {
    "no requests yet": (Rate(1, 100), [], 0, 100, True),
    "one of one request": (Rate(1), [(0, 10)], 30, 10, False),
    "one of two requests": (Rate(2), [(0, 10)], 0, 10, True),
    "a minute ago": (Rate(1), [(0, 10)], MINUTE_S + GRAIN_S, 10, True),
    "less than a minute ago": (Rate(1), [(0, 10)], MINUTE_S, 10, False),
    "exactly the remaining tokens": (Rate(None, 100), [(0, 60)], 1, 40, True),
    "one token too many": (Rate(None, 100), [(0, 60)], 1, 41, False),
    "more tokens than the limit, alone": (Rate(None, 100), [], 0, 5000, True),
    "more tokens than the limit, not alone": (Rate(None, 100), [(0, 1)], 1, 5000, False),
    "after a request above the limit": (Rate(None, 100), [(0, 5000)], 59, 1, False),
    "room for tokens, not for requests": (Rate(1, 100), [(0, 1)], 1, 1, False),
}


@pytest.mark.parametrize(("rate", "started", "now", "tokens", "expected"), ROOM.values(), ids=ROOM)
def test_has_room_depends_on_requests_and_tokens_of_the_last_minute(
    rate: Rate, started: list[tuple[float, int]], now: float, tokens: int, expected: bool
) -> None:
    for at, taken in started:
        rate.add_request(taken, at)
    rate.move(now)
    assert rate.has_room(tokens) is expected
    assert (rate.frees_at(tokens) <= now) is expected


USED: dict[str, tuple[float, int | None, float, tuple[int, int]]] = {
    "less than reserved": (5, 30, 6, (1, 30)),
    "nothing sent": (5, None, 6, (0, 0)),
    "more than reserved": (5, 300, 6, (1, 300)),
    "more than reserved, started long ago": (90, 300, 91, (0, 200)),
    "less than reserved, started long ago": (90, 30, 91, (0, 0)),
    "nothing sent, started long ago": (90, None, 91, (0, 0)),
    "more than reserved, counted from the end": (50, 300, 50 + MINUTE_S - 1, (0, 200)),
}


@pytest.mark.parametrize(("ended", "used", "now", "expected"), USED.values(), ids=USED)
def test_settle_counts_the_used_tokens(ended: float, used: int | None, now: float, expected: tuple[int, int]) -> None:
    rate = Rate(9, 1000)
    grain = rate.add_request(100, 0)
    rate.settle(grain, 100, used, ended)
    rate.move(now)
    assert (rate.requests, rate.tokens) == expected


@given(
    gaps=st.lists(st.floats(0, 40), max_size=60),
    most=st.integers(1, 5),
    tokens=st.lists(st.integers(1, 90), min_size=1),
)
def test_no_minute_exceeds_the_rate(gaps: list[float], most: int, tokens: list[int]) -> None:
    rate, now, started = Rate(most, 100), 1000.0, []
    for index, gap in enumerate(gaps):
        now += gap
        rate.move(now)
        requested = tokens[index % len(tokens)]
        if not rate.has_room(requested):
            frees = rate.frees_at(requested)
            assert now < frees <= now + MINUTE_S + GRAIN_S
            now = frees
            rate.move(now)
            assert rate.has_room(requested)
        rate.add_request(requested, now)
        started.append((now, requested))
        minute = [each for each in started if each[0] > now - MINUTE_S]
        assert len(minute) <= most
        assert sum(each[1] for each in minute) <= 100


def test_memory_does_not_grow_with_the_rate() -> None:
    rate = Rate(10**9)
    for number in range(50_000):
        rate.add_request(1, number / 500)
    rate.move(100.0)
    assert len(rate._grains) <= GRAINS + 1
    assert 30_000 <= rate.requests <= 30_000 + 500 * GRAIN_S + 1
