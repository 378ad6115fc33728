"""Round robin: everyone gets its share, and everyone stands somewhere in every order."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.routing.policy import round_robin

CASES: dict[str, tuple[list[int], list[list[int]]]] = {
    "none": ([], [[], []]),
    "one": ([1], [[0], [0]]),
    "two take turns": ([1, 1], [[0, 1], [1, 0], [0, 1]]),
    "three take turns": ([1, 1, 1], [[0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 1, 2]]),
    "two to one": ([2, 1], [[0, 1], [1, 0], [0, 1], [0, 1], [1, 0]]),
}


@pytest.mark.parametrize(("weights", "orders"), CASES.values(), ids=CASES)
def test_the_order_turn_by_turn(weights: list[int], orders: list[list[int]]) -> None:
    assert [round_robin(weights, turn) for turn in range(len(orders))] == orders


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=6), start=st.integers(0, 10_000))
def test_each_comes_first_as_often_as_its_weight_says(weights: list[int], start: int) -> None:
    orders = [round_robin(weights, start + turn) for turn in range(sum(weights))]
    first = Counter(order[0] for order in orders)
    assert [first[index] for index in range(len(weights))] == weights
    assert all(sorted(order) == list(range(len(weights))) for order in orders)


@pytest.mark.parametrize("weights", [[3, 3], [3, 2], [4, 4, 4], [1, 6]], ids=str)
def test_a_light_candidate_never_waits_for_a_run_of_a_heavy_one(weights: list[int]) -> None:
    firsts = [round_robin(weights, turn)[0] for turn in range(4 * sum(weights))]
    longest = max(len(list(run)) for _, run in groupby(firsts))
    assert longest <= max(1, round(max(weights) / min(weights)))
