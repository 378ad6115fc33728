"""Estimates of fidelity: known values, and intervals that contain the truth as often as they promise."""

from __future__ import annotations

from math import inf, log
from random import Random

import pytest

from unisono.fidelity.statistics import Group, divergence, mean, paired_difference, proportion


def test_wilsons_interval_of_independent_values() -> None:
    # Each value is a group of its own.
    found = proportion([Group(1, 1)] * 8 + [Group(0, 1)] * 2)
    assert found is not None
    assert (found.value, found.count) == (0.8, 10)
    # Values of a sample vary by n/(n-1) more than their variance says, so that ten count as nine.
    assert found.low == pytest.approx(0.4738, abs=1e-3)
    assert found.high == pytest.approx(0.9467, abs=1e-3)


def test_perfect_agreement_is_no_certainty() -> None:
    found = proportion([Group(100, 100)] * 10)
    assert found is not None
    assert found.value == found.high == 1
    assert 0.99 < found.low < 1


def test_values_of_one_answer_count_less_than_independent_ones() -> None:
    grouped = proportion([Group(100, 100)] * 9 + [Group(0, 100)])
    single = proportion([Group(1, 1)] * 900 + [Group(0, 1)] * 100)
    assert grouped is not None
    assert single is not None
    assert grouped.value == single.value
    assert grouped.high - grouped.low > 5 * (single.high - single.low)


def test_no_values_have_no_estimate() -> None:
    assert proportion([]) is mean([]) is None
    assert proportion([Group(0, 0)]) is None


def test_the_mean_of_one_answer_has_no_bounds() -> None:
    found = mean([Group(6.0, 3)])
    assert found is not None
    assert (found.value, found.low, found.high) == (2.0, -inf, inf)


def test_intervals_contain_the_true_share_in_about_95_of_100_cases() -> None:
    random = Random(3)
    hits = 0
    for _ in range(400):
        groups = []
        for _ in range(40):
            share = min(max(random.gauss(0.9, 0.05), 0), 1)
            groups.append(Group(sum(random.random() < share for _ in range(50)), 50))
        found = proportion(groups)
        assert found is not None
        hits += found.low <= 0.899 <= found.high
    assert 0.90 <= hits / 400 <= 0.99


HALVES = ((1, log(0.5)), (2, log(0.5)))


@pytest.mark.parametrize(
    ("first", "second", "nats"),
    [
        (HALVES, HALVES, 0.0),
        (((1, log(0.5)), (2, log(0.25))), ((1, log(0.5)), (2, log(0.25))), 0.0),
        (((1, log(0.8)),), ((1, log(0.4)),), 0.8 * log(2) + 0.2 * log(0.2 / 0.6)),
        # The second distribution does not list token 2, which is at most as likely as token 3.
        (((1, log(0.6)), (2, log(0.3))), ((1, log(0.6)), (3, log(0.1))), 0.3 * log(3) + 0.1 * log(0.1 / 0.3)),
        ((), HALVES, 0.0),
    ],
)
def test_divergence_has_the_value_of_its_definition(
    first: tuple[tuple[int, float], ...], second: tuple[tuple[int, float], ...], nats: float
) -> None:
    assert divergence(first, second) == pytest.approx(nats, abs=1e-9)


@pytest.mark.parametrize(
    ("won", "lost", "p_value"), [(0, 0, 1.0), (5, 5, 1.0), (6, 0, 2 / 64), (1, 9, 22 / 1024), (0, 1, 1.0)]
)
def test_paired_results_are_compared_by_mcnemars_test(won: int, lost: int, p_value: float) -> None:
    before = [False] * won + [True] * lost + [True] * 10
    after = [True] * won + [False] * lost + [True] * 10
    found = paired_difference(before, after)
    assert found.value == pytest.approx((won - lost) / len(before))
    assert found.p_value == pytest.approx(p_value)
    assert found.low <= found.value <= found.high


@pytest.mark.parametrize(
    ("count", "changed", "share"), [(34, 0.1, 0.5), (60, 0.2, 0.9), (60, 0.5, 0.7), (300, 0.02, 0.9)]
)
def test_intervals_of_differences_contain_the_true_one(count: int, changed: float, share: float) -> None:
    """`changed` is the share of the cases that are repeated with a new share of right answers instead of 0.7."""
    random, hits = Random(5), 0
    for _ in range(400):
        before = [random.random() < 0.7 for _ in range(count)]
        after = [random.random() < share if random.random() < changed else right for right in before]
        found = paired_difference(before, after)
        hits += found.low <= changed * (share - 0.7) <= found.high
    assert hits >= 372


def test_equal_results_of_few_cases_are_no_certainty() -> None:
    found = paired_difference([True] * 34, [True] * 34)
    assert found.high == -found.low == pytest.approx(0.0544, abs=1e-4)
