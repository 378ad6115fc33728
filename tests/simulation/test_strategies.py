"""The gateway's own strategies in the simulation: invariants, and the purpose of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.simulation.test_run import FAST, PLANS, SLOW, SMALL, TRAFFIC, changed
from unisono.routing.deployment_choice import Strategy
from unisono.simulation import BackendPlan, Outage, SimulationPlan, StrategyResult, plan, simulate
from unisono.simulation.results import SimulatedEnd
from unisono.simulation.run import PlacementRequest
from unisono.simulation.strategies import Serving, serving
from unisono.simulation.traffic import US


def run(settings: SimulationPlan, strategy: str = "prefix-aware") -> StrategyResult:
    return simulate(settings, strategy, serving(settings))


def test_the_simulation_has_the_strategies_of_the_gateway() -> None:
    assert set(plan.STRATEGIES) == set(Strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", plan.STRATEGIES)
@pytest.mark.parametrize("settings", PLANS.values(), ids=PLANS)
def test_every_request_ends_once_and_releases_its_slot(settings: SimulationPlan, strategy: str) -> None:
    made: list[Serving] = []

    def make(name: str, backends: Sequence[BackendPlan]) -> Serving:
        made.append(serving(settings)(name, backends))
        return made[0]

    result = simulate(settings, strategy, make)
    assert all(each.end is not None for each in result.requests)
    assert result.done + result.refused == len(result.requests)
    for candidate in made[0].candidates:
        assert (candidate.running, candidate.tokens, candidate.work) == (0, 0, 0)


@pytest.mark.parametrize("strategy", plan.STRATEGIES)
def test_equal_seeds_give_equal_results(strategy: str) -> None:
    assert run(SMALL, strategy).requests == run(SMALL, strategy).requests


@pytest.mark.slow
def test_prefix_aware_has_more_cache_hits_and_faster_first_tokens() -> None:
    settings = replace(SMALL, requests=3000, traffic=replace(TRAFFIC, rate=0.4))
    aware, busy, shuffled = (run(settings, strategy) for strategy in ("prefix-aware", "least-busy", "simple-shuffle"))
    assert aware.hit_rate > busy.hit_rate + 0.03
    assert aware.hit_rate > shuffled.hit_rate + 0.08
    assert aware.first_token.p95 < busy.first_token.p95 < shuffled.first_token.p95


@pytest.mark.parametrize("limit", [1, 3])
def test_no_backend_exceeds_its_limit_of_parallel_requests(limit: int) -> None:
    settings = replace(
        changed(SMALL, max_parallel_requests=limit), traffic=replace(TRAFFIC, rate=3.0), max_queue=10_000
    )
    served = [each for each in run(settings).requests if each.end is SimulatedEnd.DONE]
    for backend in range(3):
        own = [each for each in served if each.backend == backend]
        moments = sorted([(each.placed_us, 1) for each in own] + [(each.ended_us, -1) for each in own])
        running = 0
        for _, change in moments:
            running += change
            assert running <= limit


def test_rate_limits_of_backends_hold_and_waiting_requests_are_served() -> None:
    settings = replace(changed(SMALL, rpm=20), max_queue=10_000, queue_timeout_s=10_000.0)
    served = run(settings).requests
    assert {each.end for each in served} == {SimulatedEnd.DONE}
    for backend in range(3):
        moments = sorted(each.placed_us for each in served if each.backend == backend)
        assert all(later - earlier > 60 * US for earlier, later in zip(moments, moments[20:], strict=False))
    fewer = run(changed(settings, rpm=None, tpm=40_000)).requests
    assert {each.end for each in fewer} == {SimulatedEnd.DONE}
    assert max(each.ended_us for each in fewer) > max(each.ended_us for each in run(SMALL).requests)


def test_a_higher_order_is_used_only_when_the_lower_one_is_down() -> None:
    settings = replace(SMALL, backends=(FAST, replace(SLOW, order=1)))
    assert [use.requests for use in run(settings).uses] == [1000, 0]
    failed = replace(settings, backends=(replace(FAST, down=(Outage(0.0, 1e6),)), replace(SLOW, order=1)))
    assert [use.requests for use in run(failed).uses] == [0, 1000]


def test_weights_are_shares_of_requests() -> None:
    settings = replace(SMALL, backends=(replace(FAST, weight=3), replace(FAST, name="other")), requests=2000)
    assert run(settings, "simple-shuffle").uses[0].share == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize(("sticky", "backend_counts"), [(True, {1}), (False, {1, 2, 3})], ids=["named", "not named"])
def test_a_named_conversation_stays_on_its_backend(sticky: bool, backend_counts: set[int]) -> None:
    """Prompts are too short for the prefix index, and there is no other load."""
    settings = replace(SMALL, backends=(replace(FAST, count=3),), traffic=replace(TRAFFIC, sticky=sticky))
    chooser = serving(settings)("prefix-aware", [replace(FAST, name=name) for name in "abc"])
    used: dict[int, set[int]] = {conversation: set() for conversation in range(30)}
    for turn in range(4):
        for conversation, backends in used.items():
            wish = PlacementRequest(conversation, 20 * turn, ())
            backend = chooser.choose(wish, 0)
            assert backend is not None
            backends.add(backend)
            chooser.release(wish, backend, 1000, 0)
    assert {len(backends) for backends in used.values()} <= backend_counts
    # Conversations are still spread over all backends.
    assert {backend for backends in used.values() for backend in backends} == {0, 1, 2}
