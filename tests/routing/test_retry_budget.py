"""Second tries: what they may add to the load, and what a quiet group can always afford."""

from __future__ import annotations

import pytest

from unisono.routing.retry_budget import RetryBudget


def test_tries_add_a_tenth_to_the_load_when_everything_fails() -> None:
    budget, paid = RetryBudget(), 0
    for request in range(1000):
        # All within a second, and a hundred of them at a time.
        now = request / 1000
        budget.add_request(100, now)
        paid += budget.pay(now)
    assert 100 <= paid <= 112


QUIET: dict[str, tuple[list[float], list[bool]]] = {
    "what lies in reserve": ([0] * 10, [True] * 10),
    "and no more": ([0] * 11, [True] * 10 + [False]),
    "it comes back": ([0] * 10 + [1, 1], [True] * 11 + [False]),
    "and no more than it was": ([0] * 10 + [999] * 11, [True] * 20 + [False]),
}


@pytest.mark.parametrize(("times", "paid"), QUIET.values(), ids=QUIET)
def test_the_reserve(times: list[float], paid: list[bool]) -> None:
    budget = RetryBudget()
    assert [budget.pay(now) for now in times] == paid


@pytest.mark.parametrize(("in_flight", "at_most"), [(1, 10), (100, 10), (200, 20), (1000, 100)])
def test_what_is_saved_is_a_tenth_of_what_is_in_flight(in_flight: int, at_most: int) -> None:
    budget = RetryBudget()
    for _ in range(5000):
        budget.add_request(in_flight, 0.0)
    assert sum(budget.pay(0.0) for _ in range(500)) == at_most
