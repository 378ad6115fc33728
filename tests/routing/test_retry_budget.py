"""Retry budget: load added by retries, and the reserve of a quiet group."""

from __future__ import annotations

import pytest

from unisono.routing.retries import RetryBudget


def test_retries_add_a_tenth_to_the_load_if_all_requests_fail() -> None:
    budget, paid = RetryBudget(), 0
    for request in range(1000):
        # All requests arrive within a second, a hundred of them in flight.
        now = request / 1000
        budget.add_request(100, now)
        paid += budget.pay(now)
    assert 100 <= paid <= 112


QUIET: dict[str, tuple[list[float], list[bool]]] = {
    "full reserve": ([0] * 10, [True] * 10),
    "exhausted reserve": ([0] * 11, [True] * 10 + [False]),
    "partly refilled reserve": ([0] * 10 + [1, 1], [True] * 11 + [False]),
    "completely refilled reserve": ([0] * 10 + [999] * 11, [True] * 20 + [False]),
}


@pytest.mark.parametrize(("times", "paid"), QUIET.values(), ids=QUIET)
def test_the_reserve_pays_for_retries_of_a_quiet_group(times: list[float], paid: list[bool]) -> None:
    budget = RetryBudget()
    assert [budget.pay(now) for now in times] == paid


@pytest.mark.parametrize(("in_flight", "at_most"), [(1, 10), (100, 10), (200, 20), (1000, 100)])
def test_the_budget_is_capped_at_a_tenth_of_the_requests_in_flight(in_flight: int, at_most: int) -> None:
    budget = RetryBudget()
    for _ in range(5000):
        budget.add_request(in_flight, 0.0)
    assert sum(budget.pay(0.0) for _ in range(500)) == at_most
