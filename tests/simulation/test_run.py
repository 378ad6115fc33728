"""Simulated runs: invariants of every run, and comparisons with theory."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.standins import LeastBusy, LeastWork, RoundRobin
from unisono.simulation import (
    BackendPlan,
    Burst,
    Outage,
    SimulationPlan,
    StrategyResult,
    TrafficPlan,
    simulate,
    to_json,
)
from unisono.simulation.results import SimulatedEnd, times

FAST = BackendPlan("fast", prefill_tps=8000, decode_tps=120)
SLOW = BackendPlan("slow", prefill_tps=3000, decode_tps=50, max_batch=16, cache_tokens=100_000)
TRAFFIC = TrafficPlan(rate=0.3)
SMALL = SimulationPlan(backends=(replace(FAST, count=2), SLOW), traffic=TRAFFIC, requests=1000)


def run(plan: SimulationPlan, strategy: type[RoundRobin] = LeastWork) -> StrategyResult:
    return simulate(plan, strategy.__name__, lambda name, backends: strategy(backends))


def changed(plan: SimulationPlan, **backend: Any) -> SimulationPlan:
    return replace(plan, backends=tuple(replace(each, **backend) for each in plan.backends))


PLANS = {
    "light load": SMALL,
    "overload": replace(SMALL, traffic=replace(TRAFFIC, rate=50.0), max_queue=20, queue_timeout_s=2.0),
    "limits": changed(SMALL, max_parallel_requests=2),
    "limits without a queue": replace(changed(SMALL, max_parallel_requests=1), max_queue=0),
    "tokens in flight": changed(SMALL, max_tokens_in_flight=5000),
    "rates": changed(SMALL, rpm=20, tpm=50_000),
    "a cache for one request": changed(SMALL, cache_tokens=0),
    "no cache": changed(SMALL, prefix_cache=False),
    "bursts": replace(SMALL, traffic=replace(TRAFFIC, burst=Burst(every_s=30, for_s=2, times=20))),
    "silence between bursts": replace(SMALL, traffic=replace(TRAFFIC, burst=Burst(every_s=30, for_s=30, times=3))),
    "outages of one backend": replace(SMALL, backends=(replace(FAST, down=(Outage(20, 30), Outage(100, 5))), FAST)),
    "outages of all backends": changed(replace(SMALL, backends=(FAST, SLOW)), down=(Outage(20, 30), Outage(30, 60))),
    "many short outages": replace(
        changed(SMALL, down=tuple(Outage(at, 0.5) for at in range(5, 200, 2))), queue_timeout_s=0.2
    ),
    "batches of one": changed(SMALL, max_batch=1),
    "single requests without tools": replace(SMALL, traffic=replace(TRAFFIC, turns=1.0, tool_steps=0.0)),
}


@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize("strategy", [LeastWork, LeastBusy, RoundRobin])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_request_ends_once_and_in_order(plan: SimulationPlan, strategy: type[RoundRobin]) -> None:
    result = run(plan, strategy)
    assert 0 < len(result.requests) <= plan.requests
    for each in result.requests:
        assert each.end is not None
        assert each.ended_us >= each.arrived_us
        if each.end is SimulatedEnd.DONE:
            assert each.arrived_us <= each.placed_us <= each.entered_us <= each.first_us <= each.ended_us
            assert each.backend >= 0
            assert 0 <= each.cached < each.prompt
        else:
            assert each.placed_us == each.backend == -1
    assert result.done + result.refused == len(result.requests)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_no_backend_is_busy_for_more_than_the_whole_time(plan: SimulationPlan) -> None:
    result = run(plan)
    # An outage may come after the last answer, with an idle time in between.
    assert all(0 <= use.busy <= 1 for use in result.uses)
    assert sum(use.share for use in result.uses) == pytest.approx(1)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_equal_plans_and_seeds_give_equal_results(plan: SimulationPlan) -> None:
    assert run(plan).requests == run(plan).requests


def test_another_seed_gives_another_result() -> None:
    assert run(SMALL).requests != run(replace(SMALL, seed=2)).requests


def test_all_requests_are_answered_under_light_load() -> None:
    result = run(SMALL)
    assert (len(result.requests), result.done, result.refused, result.moved) == (1000, 1000, 0, 0)


# -- times that can be computed

SINGLE = SimulationPlan(
    backends=(BackendPlan("one", prefill_tps=1000, decode_tps=100, max_batch=1, prefix_cache=False),),
    traffic=TrafficPlan(
        rate=0.01, system_tokens=0, user_tokens=500, output_tokens=101, spread=0.0, turns=1.0, tool_steps=0.0
    ),
    requests=1,
)


def test_a_single_request_takes_its_prefill_and_decode_time() -> None:
    [served] = run(SINGLE).requests
    assert served.entered_us == served.arrived_us
    assert served.first_us - served.arrived_us == pytest.approx(500_000, abs=2)
    assert served.ended_us - served.first_us == pytest.approx(1_000_000, abs=2)


def simultaneous(count: int, **backend: Any) -> StrategyResult:
    """Simulate `count` simultaneous requests."""
    plan = replace(SINGLE, requests=count, traffic=replace(SINGLE.traffic, rate=1e6))
    return run(changed(plan, **backend))


def test_a_full_batch_generates_at_the_total_decode_rate() -> None:
    result = simultaneous(8, max_batch=8, decode_total_tps=400, prefill_tps=1e9)
    # 8 times 100 tokens after the first ones.
    assert max(each.ended_us for each in result.requests) / 1e6 == pytest.approx(8 * 100 / 400, rel=0.03)


def test_requests_enter_a_full_batch_in_the_order_of_arrival() -> None:
    result = simultaneous(6, max_batch=2, prefill_tps=1e9)
    entered = [each.entered_us for each in result.requests]
    assert entered == sorted(entered)
    assert entered[1] < 100
    assert entered[2] > 500_000


def test_a_cache_for_two_requests_delays_the_third() -> None:
    result = simultaneous(3, max_batch=8, prefill_tps=1e9, cache_tokens=1300)
    entered = sorted(each.entered_us for each in result.requests)
    assert entered[1] < 100
    assert entered[2] > 500_000


def test_prefill_slows_the_decoding_of_other_requests() -> None:
    alone = simultaneous(1, max_batch=8, prefill_tps=1000)
    together = simultaneous(2, max_batch=8, prefill_tps=1000, decode_total_tps=800)
    assert together.requests[0].ended_us > alone.requests[0].ended_us + 400_000


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("spread", [0.0, math.sqrt(math.log(2))], ids=["constant", "exponential"])
def test_the_wait_for_one_server_matches_pollaczek_khinchine(load: float, spread: float) -> None:
    """With the variance of the exponential distribution, the mean wait is that of M/M/1."""
    service_s = 4.0
    plan = SimulationPlan(
        backends=(BackendPlan("one", prefill_tps=1e9, decode_tps=100, max_batch=1, cache_tokens=0),),
        traffic=TrafficPlan(
            rate=load / service_s,
            system_tokens=0,
            user_tokens=1,
            output_tokens=401,
            spread=spread,
            turns=1.0,
            tool_steps=0.0,
        ),
        requests=30_000,
        max_queue=0,
    )
    variance = math.exp(spread * spread) - 1
    expected = load * (1 + variance) / (2 * (1 - load)) * service_s
    result = run(plan)
    assert result.refused == 0
    assert result.wait.mean == pytest.approx(expected, rel=0.1)
    assert result.uses[0].busy == pytest.approx(load, rel=0.03)


def test_the_queue_of_the_gateway_waits_as_long_as_that_of_a_backend() -> None:
    backend_queue = replace(SINGLE, requests=2000, traffic=replace(SINGLE.traffic, rate=0.4))
    gateway_queue = replace(changed(backend_queue, max_parallel_requests=1), max_queue=10_000, queue_timeout_s=1e6)
    assert run(gateway_queue).wait.mean == pytest.approx(run(backend_queue).wait.mean, rel=0.01)


# -- comparisons


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("strategy", [LeastWork, LeastBusy, RoundRobin])
def test_more_backends_are_never_slower_on_average(strategy: type[RoundRobin]) -> None:
    """Compare backends without caches.

    Under light load, each of several caches would contain fewer prompts.
    """
    plan = replace(SMALL, traffic=replace(TRAFFIC, rate=1.0), requests=2000)
    fast = replace(FAST, prefix_cache=False)
    results = [run(replace(plan, backends=(replace(fast, count=count),)), strategy) for count in (1, 2, 4, 8)]
    means = [result.answer_times.mean for result in results]
    assert means == sorted(means, reverse=True)
    firsts = [result.first_token.mean for result in results]
    assert firsts == sorted(firsts, reverse=True)


def test_cache_aware_choice_has_a_higher_hit_rate_than_round_robin() -> None:
    plan = replace(SMALL, requests=3000)
    assert run(plan, LeastWork).hit_rate > run(plan, RoundRobin).hit_rate + 0.1


def test_the_hit_rate_is_zero_without_a_cache() -> None:
    assert run(changed(SMALL, prefix_cache=False)).hit_rate == 0


def test_a_larger_cache_has_a_higher_hit_rate() -> None:
    rates = [run(changed(SMALL, cache_tokens=tokens)).hit_rate for tokens in (10_000, 50_000, 1_000_000)]
    assert rates == sorted(rates)
    assert rates[0] < rates[2] - 0.1


def test_keys_with_few_requests_wait_less_than_keys_with_many() -> None:
    """Few requests of a key do not wait for the many of another: the queue serves keys in turn."""
    plan = replace(changed(SMALL, max_parallel_requests=4), traffic=replace(TRAFFIC, rate=2.0, keys=50), requests=3000)
    result = run(replace(plan, max_queue=10_000, queue_timeout_s=1e6))
    requests_by_key = Counter(each.key for each in result.requests)
    keys_by_requests = [key for key, _ in requests_by_key.most_common()]

    def mean_wait(keys: list[int]) -> float:
        return times(each.placed_us - each.arrived_us for each in result.requests if each.key in keys).mean

    assert mean_wait(keys_by_requests[-10:]) < 0.8 * mean_wait(keys_by_requests[:10])


# -- outages


def test_answers_of_a_failed_backend_continue_on_another() -> None:
    plan = replace(PLANS["outages of one backend"], traffic=replace(TRAFFIC, rate=1.0))
    result = run(plan)
    moved = [each for each in result.requests if each.moved]
    assert moved
    assert all(each.end is SimulatedEnd.DONE for each in moved)
    # The output so far is a part of the new prompt, and is not generated again.
    assert all(each.prompt > each.output for each in moved)
    undisturbed = run(replace(plan, backends=(FAST, FAST)))
    assert result.first_token.mean > undisturbed.first_token.mean


def test_a_backend_that_is_down_receives_no_requests() -> None:
    plan = replace(SMALL, backends=(replace(FAST, down=(Outage(0.0, 1e6),)), FAST), requests=200)
    assert [use.requests for use in run(plan).uses] == [0, 200]


def test_without_a_backend_new_requests_time_out_and_moved_ones_wait() -> None:
    plan = replace(changed(SMALL, down=(Outage(60, 120),)), max_queue=5, queue_timeout_s=10, requests=2000)
    result = run(plan)
    ends = [each.end for each in result.requests]
    assert SimulatedEnd.LATE in ends
    assert all(each.end is SimulatedEnd.DONE for each in result.requests if each.moved)


# -- figures


@pytest.mark.parametrize(
    ("durations", "expected"),
    [([], (0, 0, 0, 0)), ([2_000_000], (2, 2, 2, 2)), (range(0, 101_000_000, 1_000_000), (50, 50, 95, 99))],
    ids=["no value", "one value", "101 values"],
)
def test_means_and_percentiles_are_exact(durations: Any, expected: tuple[float, ...]) -> None:
    found = times(durations)
    assert (found.mean, found.p50, found.p95, found.p99) == pytest.approx(expected)


@pytest.mark.slow
def test_the_json_of_ten_thousand_requests_has_all_figures() -> None:
    plan = replace(SMALL, requests=10_000)
    document: Any = to_json(plan, [run(plan)])
    figures = document["strategies"]["LeastWork"]
    assert figures["done"] == 10_000
    assert sum(backend["requests"] for backend in figures["backends"]) == 10_000
    assert figures["first_token_s"]["p50"] <= figures["first_token_s"]["p95"] <= figures["first_token_s"]["p99"]
