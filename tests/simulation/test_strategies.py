"""The gateway's own strategies in the model: what has to hold of every run, and what each of them is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.simulation.test_run import FAST, PLANS, SLOW, SMALL, TALKS, changed
from unisono.routing.policy import STRATEGIES
from unisono.simulation import BackendPlan, Outage, SimulationPlan, StrategyResult, plan, simulate
from unisono.simulation.results import SimulatedEnd
from unisono.simulation.run import PlacementRequest
from unisono.simulation.strategies import Serving, serving
from unisono.simulation.traffic import US


def ran(of: SimulationPlan, strategy: str = "prefix-aware") -> StrategyResult:
    return simulate(of, strategy, serving(of))


def test_there_are_those_that_the_gateway_has() -> None:
    assert set(plan.STRATEGIES) == set(STRATEGIES)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("of", PLANS.values(), ids=PLANS)
def test_every_request_ends_once_and_nothing_stays_behind(of: SimulationPlan, strategy: str) -> None:
    made: list[Serving] = []

    def make(name: str, backends: Sequence[BackendPlan]) -> Serving:
        made.append(serving(of)(name, backends))
        return made[0]

    result = simulate(of, strategy, make)
    assert all(each.end is not None for each in result.requests)
    assert result.done + result.refused == len(result.requests)
    for candidate in made[0].candidates:
        assert (candidate.running, candidate.tokens, candidate.work) == (0, 0, 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equal_seeds_end_equally(strategy: str) -> None:
    assert ran(SMALL, strategy).requests == ran(SMALL, strategy).requests


def test_following_prefixes_finds_more_and_answers_sooner_than_the_others() -> None:
    of = replace(SMALL, requests=3000, traffic=replace(TALKS, rate=0.4))
    aware, busy, shuffled = (ran(of, strategy) for strategy in ("prefix-aware", "least-busy", "simple-shuffle"))
    assert aware.hit_rate > busy.hit_rate + 0.03
    assert aware.hit_rate > shuffled.hit_rate + 0.08
    assert aware.first_token.p95 < busy.first_token.p95 < shuffled.first_token.p95


@pytest.mark.parametrize("most", [1, 3])
def test_no_backend_has_more_requests_than_it_may(most: int) -> None:
    of = replace(changed(SMALL, max_parallel_requests=most), traffic=replace(TALKS, rate=3.0), max_queue=10_000)
    served = [each for each in ran(of).requests if each.end is SimulatedEnd.DONE]
    for backend in range(3):
        own = [each for each in served if each.backend == backend]
        moments = sorted([(each.placed_us, 1) for each in own] + [(each.ended_us, -1) for each in own])
        held = 0
        for _, change in moments:
            held += change
            assert held <= most


def test_no_backend_begins_more_in_a_minute_than_it_may_and_those_who_wait_are_served() -> None:
    of = replace(changed(SMALL, rpm=20), max_queue=10_000, queue_timeout_s=10_000.0)
    served = ran(of).requests
    assert {each.end for each in served} == {SimulatedEnd.DONE}
    for backend in range(3):
        moments = sorted(each.placed_us for each in served if each.backend == backend)
        assert all(later - earlier > 60 * US for earlier, later in zip(moments, moments[20:], strict=False))
    fewer = ran(changed(of, rpm=None, tpm=40_000)).requests
    assert {each.end for each in fewer} == {SimulatedEnd.DONE}
    assert max(each.ended_us for each in fewer) > max(each.ended_us for each in ran(SMALL).requests)


def test_a_higher_order_stands_by() -> None:
    of = replace(SMALL, backends=(FAST, replace(SLOW, order=1)))
    assert [use.requests for use in ran(of).uses] == [1000, 0]
    dead = replace(of, backends=(replace(FAST, down=(Outage(0.0, 1e6),)), replace(SLOW, order=1)))
    assert [use.requests for use in ran(dead).uses] == [0, 1000]


def test_weights_are_shares_of_turns() -> None:
    of = replace(SMALL, backends=(replace(FAST, weight=3), replace(FAST, name="other")), requests=2000)
    assert ran(of, "simple-shuffle").uses[0].share == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize(("sticky", "places"), [(True, {1}), (False, {1, 2, 3})], ids=["named", "not named"])
def test_requests_that_name_their_conversation_go_where_it_was(sticky: bool, places: set[int]) -> None:
    """Prompts too short to show where they belong, and nothing else to do."""
    of = replace(SMALL, backends=(replace(FAST, count=3),), traffic=replace(TALKS, sticky=sticky))
    chooser = serving(of)("prefix-aware", [replace(FAST, name=name) for name in "abc"])
    seen: dict[int, set[int]] = {talk: set() for talk in range(30)}
    for turn in range(4):
        for talk, where in seen.items():
            wish = PlacementRequest(talk, 20 * turn, ())
            backend = chooser.choose(wish, 0)
            assert backend is not None
            where.add(backend)
            chooser.release(wish, backend, 1000, 0)
    assert {len(where) for where in seen.values()} <= places
    # Conversations are spread all the same.
    assert {backend for where in seen.values() for backend in where} == {0, 1, 2}
