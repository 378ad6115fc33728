"""What has to hold of every simulated run, and what theory says of some of them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.standins import Least, Turns, Work
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
TALKS = TrafficPlan(rate=0.3)
SMALL = SimulationPlan(backends=(replace(FAST, count=2), SLOW), traffic=TALKS, requests=1000)


def ran(plan: SimulationPlan, strategy: type[Turns] = Work) -> StrategyResult:
    return simulate(plan, strategy.__name__, lambda name, backends: strategy(backends))


def changed(plan: SimulationPlan, **backend: Any) -> SimulationPlan:
    return replace(plan, backends=tuple(replace(each, **backend) for each in plan.backends))


PLANS = {
    "easy": SMALL,
    "hopeless": replace(SMALL, traffic=replace(TALKS, rate=50.0), max_queue=20, queue_timeout_s=2.0),
    "limits": changed(SMALL, max_parallel_requests=2),
    "limits and no line": replace(changed(SMALL, max_parallel_requests=1), max_queue=0),
    "tokens in flight": changed(SMALL, max_tokens_in_flight=5000),
    "rates": changed(SMALL, rpm=20, tpm=50_000),
    "no memory for two": changed(SMALL, cache_tokens=0),
    "no cache": changed(SMALL, prefix_cache=False),
    "bursts": replace(SMALL, traffic=replace(TALKS, burst=Burst(every_s=30, for_s=2, times=20))),
    "silence between bursts": replace(SMALL, traffic=replace(TALKS, burst=Burst(every_s=30, for_s=30, times=3))),
    "one dies": replace(SMALL, backends=(replace(FAST, down=(Outage(20, 30), Outage(100, 5))), FAST)),
    "all die": changed(replace(SMALL, backends=(FAST, SLOW)), down=(Outage(20, 30), Outage(30, 60))),
    "all die in a hurry": replace(
        changed(SMALL, down=tuple(Outage(at, 0.5) for at in range(5, 200, 2))), queue_timeout_s=0.2
    ),
    "batches of one": changed(SMALL, max_batch=1),
    "no turns, no tools": replace(SMALL, traffic=replace(TALKS, turns=1.0, tool_steps=0.0)),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("strategy", [Work, Least, Turns])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_request_ends_once_and_in_order(plan: SimulationPlan, strategy: type[Turns]) -> None:
    result = ran(plan, strategy)
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


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_no_backend_works_more_than_all_the_time(plan: SimulationPlan) -> None:
    result = ran(plan)
    # A death may come after the last answer, with nothing to do in between.
    assert all(0 <= use.busy <= 1 for use in result.uses)
    assert sum(use.share for use in result.uses) == pytest.approx(1)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_equal_plans_and_seeds_end_equally(plan: SimulationPlan) -> None:
    assert ran(plan).requests == ran(plan).requests


def test_another_seed_is_another_run() -> None:
    assert ran(SMALL).requests != ran(replace(SMALL, seed=2)).requests


def test_everything_that_was_asked_is_answered_where_nothing_is_refused() -> None:
    result = ran(SMALL)
    assert (len(result.requests), result.done, result.refused, result.moved) == (1000, 1000, 0, 0)


# Time, as it can be computed

ALONE = SimulationPlan(
    backends=(BackendPlan("one", prefill_tps=1000, decode_tps=100, max_batch=1, prefix_cache=False),),
    traffic=TrafficPlan(
        rate=0.01, system_tokens=0, user_tokens=500, output_tokens=101, spread=0.0, turns=1.0, tool_steps=0.0
    ),
    requests=1,
)


def test_a_request_alone_takes_its_prompt_and_its_answer() -> None:
    [served] = ran(ALONE).requests
    assert served.entered_us == served.arrived_us
    assert served.first_us - served.arrived_us == pytest.approx(500_000, abs=2)
    assert served.ended_us - served.first_us == pytest.approx(1_000_000, abs=2)


def at_once(count: int, **backend: Any) -> StrategyResult:
    """So many requests that they all are there at the same time."""
    plan = replace(ALONE, requests=count, traffic=replace(ALONE.traffic, rate=1e6))
    return ran(changed(plan, **backend))


def test_a_full_batch_writes_as_much_as_it_is_said_to() -> None:
    result = at_once(8, max_batch=8, decode_total_tps=400, prefill_tps=1e9)
    # 8 times 100 tokens behind the first ones.
    assert max(each.ended_us for each in result.requests) / 1e6 == pytest.approx(8 * 100 / 400, rel=0.03)


def test_what_finds_no_place_in_the_batch_waits_in_the_order_it_came() -> None:
    result = at_once(6, max_batch=2, prefill_tps=1e9)
    entered = [each.entered_us for each in result.requests]
    assert entered == sorted(entered)
    assert entered[1] < 100
    assert entered[2] > 500_000


def test_memory_for_two_holds_back_the_third() -> None:
    result = at_once(3, max_batch=8, prefill_tps=1e9, cache_tokens=1300)
    entered = sorted(each.entered_us for each in result.requests)
    assert entered[1] < 100
    assert entered[2] > 500_000


def test_reading_a_prompt_slows_those_that_are_writing() -> None:
    alone = at_once(1, max_batch=8, prefill_tps=1000)
    together = at_once(2, max_batch=8, prefill_tps=1000, decode_total_tps=800)
    assert together.requests[0].ended_us > alone.requests[0].ended_us + 400_000


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("spread", [0.0, math.sqrt(math.log(2))], ids=["constant", "as exponential"])
def test_one_server_waits_as_long_as_pollaczek_and_khinchine_say(load: float, spread: float) -> None:
    """With a variance as the exponential distribution has it, the mean wait is that of M/M/1."""
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
    result = ran(plan)
    assert result.refused == 0
    assert result.wait.mean == pytest.approx(expected, rel=0.1)
    assert result.uses[0].busy == pytest.approx(load, rel=0.03)


def test_the_line_of_the_gateway_waits_like_that_of_a_backend() -> None:
    inside = replace(ALONE, requests=2000, traffic=replace(ALONE.traffic, rate=0.4))
    line = replace(changed(inside, max_parallel_requests=1), max_queue=10_000, queue_timeout_s=1e6)
    assert ran(line).wait.mean == pytest.approx(ran(inside).wait.mean, rel=0.01)


# Comparisons


@pytest.mark.parametrize("strategy", [Work, Least, Turns])
def test_more_backends_are_never_worse_on_average(strategy: type[Turns]) -> None:
    """Without caches: where there is little to do, a second one only means that each knows fewer prompts."""
    plan = replace(SMALL, traffic=replace(TALKS, rate=1.0), requests=2000)
    fast = replace(FAST, prefix_cache=False)
    runs = [ran(replace(plan, backends=(replace(fast, count=count),)), strategy) for count in (1, 2, 4, 8)]
    means = [run.answer_times.mean for run in runs]
    assert means == sorted(means, reverse=True)
    firsts = [run.first_token.mean for run in runs]
    assert firsts == sorted(firsts, reverse=True)


def test_following_prefixes_finds_more_of_them_than_taking_turns() -> None:
    plan = replace(SMALL, requests=3000)
    assert ran(plan, Work).hit_rate > ran(plan, Turns).hit_rate + 0.1


def test_nothing_is_found_where_nothing_is_kept() -> None:
    assert ran(changed(SMALL, prefix_cache=False)).hit_rate == 0


def test_a_larger_cache_finds_more() -> None:
    rates = [ran(changed(SMALL, cache_tokens=tokens)).hit_rate for tokens in (10_000, 50_000, 1_000_000)]
    assert rates == sorted(rates)
    assert rates[0] < rates[2] - 0.1


def test_keys_take_turns_whatever_each_of_them_asks_for() -> None:
    """Many conversations of one key, few of another: those of the few do not wait for all of the many."""
    plan = replace(changed(SMALL, max_parallel_requests=4), traffic=replace(TALKS, rate=2.0, keys=50), requests=3000)
    result = ran(replace(plan, max_queue=10_000, queue_timeout_s=1e6))
    asked = Counter(each.key for each in result.requests)
    ordered = [key for key, _ in asked.most_common()]

    def waited(keys: list[int]) -> float:
        return times(each.placed_us - each.arrived_us for each in result.requests if each.key in keys).mean

    assert waited(ordered[-10:]) < 0.8 * waited(ordered[:10])


# Deaths


def test_answers_of_a_backend_that_dies_go_on_elsewhere() -> None:
    plan = replace(PLANS["one dies"], traffic=replace(TALKS, rate=1.0))
    result = ran(plan)
    moved = [each for each in result.requests if each.moved]
    assert moved
    assert all(each.end is SimulatedEnd.DONE for each in moved)
    # What was written is read again, and written no second time.
    assert all(each.prompt > each.output for each in moved)
    undisturbed = ran(replace(plan, backends=(FAST, FAST)))
    assert result.first_token.mean > undisturbed.first_token.mean


def test_a_dead_backend_gets_nothing_and_comes_back_with_an_empty_cache() -> None:
    plan = replace(SMALL, backends=(replace(FAST, down=(Outage(0.0, 1e6),)), FAST), requests=200)
    assert [use.requests for use in ran(plan).uses] == [0, 200]


def test_with_nowhere_to_go_the_newcomers_are_refused_and_the_others_wait() -> None:
    plan = replace(changed(SMALL, down=(Outage(60, 120),)), max_queue=5, queue_timeout_s=10, requests=2000)
    result = ran(plan)
    ends = [each.end for each in result.requests]
    assert SimulatedEnd.LATE in ends
    assert all(each.end is SimulatedEnd.DONE for each in result.requests if each.moved)


# Figures


@pytest.mark.parametrize(
    ("durations", "expected"),
    [([], (0, 0, 0, 0)), ([2_000_000], (2, 2, 2, 2)), (range(0, 101_000_000, 1_000_000), (50, 50, 95, 99))],
    ids=["none", "one", "a hundred and one"],
)
def test_percentiles_are_of_what_there_was(durations: Any, expected: tuple[float, ...]) -> None:
    found = times(durations)
    assert (found.mean, found.p50, found.p95, found.p99) == pytest.approx(expected)


def test_ten_thousand_requests_are_told_in_figures() -> None:
    plan = replace(SMALL, requests=10_000)
    told: Any = to_json(plan, [ran(plan)])
    figures = told["strategies"]["Work"]
    assert figures["done"] == 10_000
    assert sum(backend["requests"] for backend in figures["backends"]) == 10_000
    assert figures["first_token_s"]["p50"] <= figures["first_token_s"]["p95"] <= figures["first_token_s"]["p99"]
