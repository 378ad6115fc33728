"""Attempts on slots: learned times, other available deployments, probes during long waits."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from math import inf

import pytest

from tests.routing.doubles import IDS, REQUEST, REQUIREMENTS, Clock, known_pool, live_of, script_of
from unisono.core.fallback_models import FallbackModels
from unisono.core.generation import Timeouts
from unisono.core.route_protocol import RouteRequest, Slot
from unisono.errors import BackendError, BackendTimeout, BackendUnavailable, ContextTooLong, UnisonoError
from unisono.routing.attempt_timeouts import MAX_SAMPLE_AGE_S, MAX_SAMPLES, LearnedTimes
from unisono.routing.circuit_breaker import BreakerConfig
from unisono.routing.deployment import LiveDeployment
from unisono.routing.deployment_config import DeploymentConfig
from unisono.routing.failover_route import GroupFailoverRoute
from unisono.routing.group import RoutingRules
from unisono.routing.pool import RoutingPool
from unisono.routing.probe_schedule import FAILING_EVERY_S

TIMEOUTS = Timeouts()
SHORT = replace(TIMEOUTS, total_s=6.0)


def begin(slot: Slot, timeouts: Timeouts = TIMEOUTS, *, elsewhere: bool = True) -> Timeouts:
    return slot.attempt_timeouts(timeouts, retries_left=2, elsewhere=elsewhere)


def learned(live: LiveDeployment) -> LearnedTimes:
    return live.times.learned(live.clock())


# -- other available deployments


def open_circuit(live: LiveDeployment) -> None:
    for _ in range(9):
        live.failed(BackendError("broken"))


async def shortest_limit(route: GroupFailoverRoute, *failures: UnisonoError) -> float:
    """Return the limit for the first token with 6 s left, after failed attempts."""
    for failure in failures:
        with await route.next_slot(REQUIREMENTS) as slot:
            begin(slot)
            slot.failed(failure)
    with await route.next_slot(REQUIREMENTS) as slot:
        limits = slot.attempt_timeouts(SHORT, retries_left=route.retries_left, elsewhere=route.elsewhere)
        return limits.first_token_s


async def test_the_limit_leaves_time_for_another_deployment() -> None:
    pool, _ = await known_pool("a", "b", clock=Clock())
    assert await shortest_limit(pool.route(REQUEST)) == 2.0


async def test_a_single_deployment_gets_the_full_time() -> None:
    pool, _ = await known_pool("a", clock=Clock())
    assert await shortest_limit(pool.route(REQUEST)) == 6.0


async def test_no_time_is_left_for_a_failed_deployment() -> None:
    pool, _ = await known_pool("a", "b", clock=Clock())
    assert await shortest_limit(pool.route(REQUEST), BackendUnavailable("gone")) == 6.0


async def test_no_time_is_left_for_a_deployment_in_cooldown() -> None:
    pool, (_, b) = await known_pool("a", "b", clock=Clock())
    open_circuit(b)
    assert await shortest_limit(pool.route(REQUEST)) == 6.0


async def test_no_time_is_left_for_a_deployment_with_too_small_a_context() -> None:
    clock = Clock()
    small = live_of("b", clock, replace(IDS, context=50))
    pool, _ = await known_pool("a", small, clock=clock)
    assert await shortest_limit(pool.route(REQUEST)) == 6.0


async def test_no_time_is_left_without_retries() -> None:
    pool, _ = await known_pool("a", "b", clock=Clock(), rules=RoutingRules(num_retries=0))
    assert await shortest_limit(pool.route(REQUEST)) == 6.0


async def test_the_limit_leaves_time_for_a_fallback_model() -> None:
    clock = Clock()
    groups = {name: [live_of(name, clock)] for name in ("m", "n")}
    pool = RoutingPool(groups, RoutingRules(num_retries=0), fallback_models={"m": FallbackModels(("n",))}, clock=clock)
    await pool.wait_for_probes(5)
    assert await shortest_limit(pool.route(RouteRequest("m"))) == 3.0


@pytest.mark.parametrize(
    ("failures", "left"),
    [([], 2), ([BackendTimeout("slow")], 1), ([ContextTooLong("long")], 2), ([BackendTimeout("slow")] * 2, 0)],
    ids=["none", "one", "prompt too long", "all"],
)
async def test_failures_use_up_the_retries(failures: list[UnisonoError], left: int) -> None:
    pool, _ = await known_pool("a", "b", "c", clock=Clock(), rules=RoutingRules(tolerance=BreakerConfig(99)))
    route = pool.route(REQUEST)
    for failure in failures:
        with await route.next_slot(REQUIREMENTS) as slot:
            slot.failed(failure)
    assert route.retries_left == left


# -- waits for the first token


async def test_unread_prompts_extend_the_limits_of_other_requests() -> None:
    clock = Clock()
    pool, (a, _) = await known_pool("a", live_of("b", clock, order=1), clock=clock)
    long = replace(REQUIREMENTS, prompt_tokens=8000)
    with await pool.route(REQUEST).next_slot(long) as slot, await pool.route(REQUEST).next_slot(REQUIREMENTS) as other:
        begin(slot)
        assert a.waits.unread_tokens == 8000
        other.record_attempt(0.2, 0.01, 100)
        a.waits.postpone_probes(inf)
        begin(other)
        # The reading speed is unknown. A probe is due after half of the limit.
        assert a.waits.next_probe_at == clock.now + 8100 / 50 / 2
        slot.record_first_token()
        assert (a.waits.unread_tokens, len(a.waits)) == (100, 1)
        begin(other)
        assert a.waits.next_probe_at == clock.now + 10.0 / 2
    assert (a.waits.unread_tokens, len(a.waits)) == (0, 0)


async def test_a_limit_that_expires_with_the_first_token_cancels_nothing() -> None:
    pool, (a, _) = await known_pool("a", live_of("b", time.monotonic, order=1), clock=time.monotonic)
    loop = asyncio.get_running_loop()
    with await pool.route(REQUEST).next_slot(REQUIREMENTS), await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        begin(slot, replace(TIMEOUTS, total_s=0.05))
        async with slot.first_token_limit():
            # The timer of the limit expires after this one, in the same iteration of the loop.
            came = loop.create_future()
            loop.call_later(0.02, came.set_result, None)
            time.sleep(0.1)
            await came
            slot.record_first_token()
            await asyncio.sleep(0.01)
        assert a.generation.last_at(a.clock()) <= a.clock()


@pytest.mark.parametrize("end", ["first token", "failed", "usage", "exit", "next attempt"])
async def test_a_wait_ends_with_its_attempt(end: str) -> None:
    pool, (a,) = await known_pool("a", clock=Clock())
    with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        begin(slot)
        assert len(a.waits) == 1
        match end:
            case "first token":
                slot.record_first_token()
            case "failed":
                slot.failed(BackendTimeout("slow"))
            case "usage":
                slot.record_usage(120)
            case "next attempt":
                begin(slot)
                assert len(a.waits) == 1
                slot.record_first_token()
            case _:
                pass
        assert len(a.waits) == (end == "exit")
    assert (a.waits.unread_tokens, len(a.waits)) == (0, 0)


async def test_the_next_attempt_on_a_slot_has_the_longer_prompt() -> None:
    pool, (a, _) = await known_pool("a", "b", clock=Clock())
    with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        assert begin(slot).first_token_s == 30.0
        slot.record_first_token()
        slot.record_usage(30_000)
        # The prompt is probably cached, but this is not certain.
        assert begin(slot).first_token_s == 300.0
        assert a.waits.unread_tokens == 0


# -- learned times


async def test_answered_attempts_make_a_deployment_warm() -> None:
    clock = Clock()
    pool, (a, _) = await known_pool("a", "b", clock=clock)
    with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        begin(slot)
        slot.record_attempt(0.5, 0.1)
        slot.record_usage(120)
        assert begin(slot).first_token_s == 10.0
    assert learned(a) == LearnedTimes(True, first_token_s=0.5, first_token_p90_s=0.5, gap_s=0.1)
    clock.now += MAX_SAMPLE_AGE_S + 1
    assert not learned(a).is_warm


async def test_timed_out_attempts_are_no_samples() -> None:
    pool, (a,) = await known_pool("a", clock=Clock())
    with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        begin(slot)
        slot.failed(BackendTimeout("slow"))
    assert learned(a) == LearnedTimes(timeouts=1)


async def test_an_unreachable_deployment_becomes_cold() -> None:
    pool, (a,) = await known_pool("a", clock=Clock())
    with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        slot.record_attempt(0.5)
        slot.failed(BackendUnavailable("gone"))
    assert learned(a) == LearnedTimes()


async def test_cached_prompts_do_not_count_as_reading_speed() -> None:
    # A long prompt is a sample of the reading speed only if the number of read tokens is known.
    long = replace(REQUIREMENTS, prompt_tokens=8192, blocks=tuple(range(64)))
    alone, (a,) = await known_pool("a", clock=Clock())
    with await alone.route(REQUEST).next_slot(long) as slot:
        begin(slot)
        slot.record_attempt(2.0)
        assert learned(a).s_per_token is None
        slot.record_attempt(2.0, read_tokens=4000)
        assert learned(a).s_per_token == 2.0 / 4000
    pool, lives = await known_pool("a", "b", clock=Clock())
    for seconds in (4.0, 0.1):
        with await pool.route(REQUEST).next_slot(long) as slot:
            begin(slot)
            slot.record_attempt(seconds)
    [warm] = [learned(live) for live in lives if learned(live).is_warm]
    # The second prompt was cached.
    assert warm.s_per_token == 4.0 / 8192
    assert warm.first_token_s == 0.1


async def test_memory_is_bounded_for_any_number_of_attempts() -> None:
    pool, (a,) = await known_pool("a", clock=Clock())
    for _ in range(3 * MAX_SAMPLES):
        with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
            begin(slot)
            slot.record_attempt(0.5)
    assert len(a.times._samples) == MAX_SAMPLES
    assert len(a.waits) == 0


# -- probes


async def test_a_long_wait_makes_probes_due() -> None:
    clock = Clock()
    pool, (a, _) = await known_pool("a", "b", clock=clock)
    a.succeeded()
    with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        limit_s = begin(slot).first_token_s
        clock.now += limit_s / 2 - 0.1
        a.succeeded()
        assert not a.stale(clock.now)
        clock.now += 0.2
        assert a.stale(clock.now)
        await a.check()
        clock.now += FAILING_EVERY_S - 0.1
        assert not a.stale(clock.now)
        clock.now += 0.2
        assert a.stale(clock.now)
        slot.record_first_token()
        a.succeeded()
        assert not a.stale(clock.now)


async def test_a_short_limit_makes_no_probe_due() -> None:
    clock = Clock()
    pool, (a, _) = await known_pool("a", "b", clock=clock)
    with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        begin(slot, Timeouts(first_token_s=0.3))
        clock.now += 0.3
        assert not a.stale(clock.now)


def deployment_with_limit(name: str, first_token_s: float) -> LiveDeployment:
    live = live_of(name, time.monotonic)
    live.become(DeploymentConfig(name, Timeouts(first_token_s=first_token_s)))
    return live


async def test_a_probe_during_a_long_wait_diverts_new_requests() -> None:
    # With the real clock, the next periodic check of the pool is seconds away.
    lives = [deployment_with_limit("a", 3.0), deployment_with_limit("b", 3.0)]
    pool, _ = await known_pool(*lives, clock=time.monotonic)
    pool.start()
    await asyncio.sleep(0.05)
    for live in lives:
        live.probes.ended_at -= 5
    with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        slow = next(live for live in lives if live is slot.deployment)
        script_of(slow).outcomes = [BackendTimeout("it hangs")]
        begin(slot, slow.timeouts)
        async with asyncio.timeout(4):
            while slow.failure is None:
                await asyncio.sleep(0.005)
        for _ in range(4):
            with await pool.route(REQUEST).next_slot(REQUIREMENTS) as other:
                assert other.deployment is not slow
        # The attempt itself continues.
        assert len(slow.waits) == 1
    await pool.aclose()


async def test_a_failed_probe_reports_the_remaining_time_to_waiting_attempts() -> None:
    clock = Clock()
    pool, lives = await known_pool("a", "b", clock=clock)
    remaining_s: list[float] = []
    with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        slow = next(live for live in lives if live is slot.deployment)
        script_of(slow).outcomes = [IDS, BackendTimeout("it hangs")]
        begin(slot)
        slot.on_failed_probe(remaining_s.append)
        clock.now += 50.0
        with pytest.raises(BackendTimeout):
            await slow.check()
        clock.now += 200.0
        with pytest.raises(BackendTimeout):
            await slow.check()
        assert remaining_s == [150.0, 0.0]
        slot.on_failed_probe(None)
        with pytest.raises(BackendTimeout):
            await slow.check()
        begin(slot, elsewhere=False)
        slot.on_failed_probe(remaining_s.append)
        with pytest.raises(BackendTimeout):
            await slow.check()
        slot.record_first_token()
        slot.on_failed_probe(remaining_s.append)
        assert len(remaining_s) == 2


async def test_a_successful_probe_calls_no_callback() -> None:
    pool, (a, b) = await known_pool("a", "b", clock=Clock())
    remaining_s: list[float] = []
    with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        begin(slot)
        slot.on_failed_probe(remaining_s.append)
        await a.check()
        await b.check()
    assert remaining_s == []
