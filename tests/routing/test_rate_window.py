"""What begins in a minute: tables, and what has to hold of every history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.routing.rate_window import GRAINS, MINUTE_S, Rate

GRAIN_S = MINUTE_S / GRAINS

ROOM: dict[str, tuple[Rate, list[tuple[float, int]], float, int, bool]] = {
    "nothing yet": (Rate(1, 100), [], 0, 100, True),
    "one request of one": (Rate(1), [(0, 10)], 30, 10, False),
    "one of two": (Rate(2), [(0, 10)], 0, 10, True),
    "a minute ago": (Rate(1), [(0, 10)], MINUTE_S + GRAIN_S, 10, True),
    "not quite a minute ago": (Rate(1), [(0, 10)], MINUTE_S, 10, False),
    "tokens to the last one": (Rate(None, 100), [(0, 60)], 1, 40, True),
    "one token too many": (Rate(None, 100), [(0, 60)], 1, 41, False),
    "larger than a minute, alone": (Rate(None, 100), [], 0, 5000, True),
    "larger than a minute, not alone": (Rate(None, 100), [(0, 1)], 1, 5000, False),
    "behind one that was larger": (Rate(None, 100), [(0, 5000)], 59, 1, False),
    "tokens do, requests do not": (Rate(1, 100), [(0, 1)], 1, 1, False),
}


@pytest.mark.parametrize(("rate", "begun", "now", "tokens", "expected"), ROOM.values(), ids=ROOM)
def test_there_is_room_or_not(
    rate: Rate, begun: list[tuple[float, int]], now: float, tokens: int, expected: bool
) -> None:
    for at, taken in begun:
        rate.add_request(taken, at)
    rate.move(now)
    assert rate.has_room(tokens) is expected
    assert (rate.frees_at(tokens) <= now) is expected


USED: dict[str, tuple[float, int | None, float, tuple[int, int]]] = {
    "less than was taken": (5, 30, 6, (1, 30)),
    "nothing was asked": (5, None, 6, (0, 0)),
    "more than was taken": (5, 300, 6, (1, 300)),
    "more, of which the beginning is long ago": (90, 300, 91, (0, 200)),
    "less, long ago": (90, 30, 91, (0, 0)),
    "nothing was asked, long ago": (90, None, 91, (0, 0)),
    "more, which counts from its end": (50, 300, 50 + MINUTE_S - 1, (0, 200)),
}


@pytest.mark.parametrize(("ended", "used", "now", "left"), USED.values(), ids=USED)
def test_what_a_request_used_counts_when_it_is_known(
    ended: float, used: int | None, now: float, left: tuple[int, int]
) -> None:
    rate = Rate(9, 1000)
    grain = rate.add_request(100, 0)
    rate.settle(grain, 100, used, ended)
    rate.move(now)
    assert (rate.requests, rate.tokens) == left


@given(
    gaps=st.lists(st.floats(0, 40), max_size=60),
    most=st.integers(1, 5),
    tokens=st.lists(st.integers(1, 90), min_size=1),
)
def test_no_minute_has_more_than_it_may(gaps: list[float], most: int, tokens: list[int]) -> None:
    rate, now, begun = Rate(most, 100), 1000.0, []
    for index, gap in enumerate(gaps):
        now += gap
        rate.move(now)
        asked = tokens[index % len(tokens)]
        if not rate.has_room(asked):
            frees = rate.frees_at(asked)
            assert now < frees <= now + MINUTE_S + GRAIN_S
            now = frees
            rate.move(now)
            assert rate.has_room(asked)
        rate.add_request(asked, now)
        begun.append((now, asked))
        minute = [each for each in begun if each[0] > now - MINUTE_S]
        assert len(minute) <= most
        assert sum(each[1] for each in minute) <= 100


def test_what_is_remembered_does_not_grow_with_the_rate() -> None:
    rate = Rate(10**9)
    for number in range(50_000):
        rate.add_request(1, number / 500)
    rate.move(100.0)
    assert len(rate._grains) <= GRAINS + 1
    assert 30_000 <= rate.requests <= 30_000 + 500 * GRAIN_S + 1
