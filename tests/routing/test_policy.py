"""Both orders: everyone gets its share, and everyone stands somewhere in every order."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.routing.policy import rendezvous, round_robin

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


STICKY: dict[str, tuple[str, list[str], list[int], list[int]]] = {
    "none": ("k", [], [], []),
    "one": ("k", ["a"], [3], [0]),
    "one key": ("conv_1", ["a", "b", "c"], [1, 1, 1], [1, 0, 2]),
    "another key": ("conv_2", ["a", "b", "c"], [1, 1, 1], [2, 1, 0]),
    "the same names elsewhere in the list": ("conv_1", ["c", "a", "b"], [1, 1, 1], [2, 1, 0]),
    "no letter is refused": ("\ud800", ["a", "b"], [1, 1], [1, 0]),
}


@pytest.mark.parametrize(("key", "names", "weights", "order"), STICKY.values(), ids=STICKY)
def test_a_key_has_its_own_order_in_every_process(
    key: str, names: list[str], weights: list[int], order: list[int]
) -> None:
    assert rendezvous(key, names, weights) == order


groups = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), st.integers(1, 9), min_size=1, max_size=6)


@given(key=st.text(max_size=12), group=groups, data=st.data())
def test_who_is_added_or_removed_changes_nothing_among_the_others(
    key: str, group: dict[str, int], data: st.DataObject
) -> None:
    names = list(group)
    order = [names[index] for index in rendezvous(key, names, list(group.values()))]
    assert sorted(order) == sorted(names)
    gone = data.draw(st.sampled_from(names))
    left = [name for name in names if name != gone]
    fewer = [left[index] for index in rendezvous(key, left, [group[name] for name in left])]
    assert fewer == [name for name in order if name != gone]


@pytest.mark.parametrize("weights", [[1, 1], [1, 1, 1, 1], [3, 1], [1, 2, 5]], ids=str)
def test_shares_of_many_keys_follow_the_weights(weights: list[int]) -> None:
    names = [f"backend {index}" for index in range(len(weights))]
    keys = 4_000
    firsts = Counter(rendezvous(f"conversation {n}", names, weights)[0] for n in range(keys))
    for index, weight in enumerate(weights):
        share = weight / sum(weights)
        # Five standard deviations of as many fair draws.
        assert abs(firsts[index] - share * keys) < 5 * (keys * share * (1 - share)) ** 0.5
