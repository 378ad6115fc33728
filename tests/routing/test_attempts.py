"""Attempts on places: what is learned from them, who can take over, and the probes that a long wait calls for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from math import inf

import pytest

from tests.routing.doubles import ASK, DEMAND, IDS, Clock, known_pool, live_of, script_of
from unisono.config import StandIns
from unisono.core.generation import Timeouts
from unisono.core.route_protocol import RouteRequest, Slot
from unisono.errors import BackendError, BackendTimeout, BackendUnavailable, ContextTooLong, UnisonoError
from unisono.routing.attempt_limits import MAX_SAMPLE_AGE_S, MAX_SAMPLES, LearnedTimes
from unisono.routing.circuit_breaker import BreakerConfig
from unisono.routing.deployment import FAILING_EVERY_S, LiveDeployment
from unisono.routing.deployment_config import DeploymentConfig
from unisono.routing.group import RoutingRules
from unisono.routing.pool import RoutingPool
from unisono.routing.route import GroupFailoverRoute

TIMEOUTS = Timeouts()
SHORT = replace(TIMEOUTS, total_s=6.0)


def begin(place: Slot, timeouts: Timeouts = TIMEOUTS, *, elsewhere: bool = True) -> Timeouts:
    return place.attempt_limits(timeouts, retries_left=2, elsewhere=elsewhere)


def learned(live: LiveDeployment) -> LearnedTimes:
    return live.times.learned(live.clock())


# -- who can take over


def resting(live: LiveDeployment) -> None:
    for _ in range(9):
        live.failed(BackendError("broken"))


async def shortest_limit(route: GroupFailoverRoute, *failures: UnisonoError) -> float:
    """Seconds to the first token when 6 s are left, behind some attempts that failed."""
    for failure in failures:
        with await route.place(DEMAND) as place:
            begin(place)
            place.failed(failure)
    with await route.place(DEMAND) as place:
        limits = place.attempt_limits(SHORT, retries_left=route.retries_left, elsewhere=route.elsewhere)
        return limits.first_token_s


async def test_time_is_left_for_another_deployment() -> None:
    pool, _ = await known_pool("a", "b", clock=Clock())
    assert await shortest_limit(pool.route(ASK)) == 2.0


async def test_a_deployment_without_another_one_has_all_the_time() -> None:
    pool, _ = await known_pool("a", clock=Clock())
    assert await shortest_limit(pool.route(ASK)) == 6.0


async def test_a_deployment_that_failed_is_no_other_one() -> None:
    pool, _ = await known_pool("a", "b", clock=Clock())
    assert await shortest_limit(pool.route(ASK), BackendUnavailable("gone")) == 6.0


async def test_a_deployment_at_rest_is_no_other_one() -> None:
    pool, (_, b) = await known_pool("a", "b", clock=Clock())
    resting(b)
    assert await shortest_limit(pool.route(ASK)) == 6.0


async def test_a_deployment_with_too_small_a_context_is_no_other_one() -> None:
    clock = Clock()
    small = live_of("b", clock, replace(IDS, context=50))
    pool, _ = await known_pool("a", small, clock=clock)
    assert await shortest_limit(pool.route(ASK)) == 6.0


async def test_without_retries_there_is_no_other_one() -> None:
    pool, _ = await known_pool("a", "b", clock=Clock(), rules=RoutingRules(num_retries=0))
    assert await shortest_limit(pool.route(ASK)) == 6.0


async def test_time_is_left_for_a_model_that_stands_in() -> None:
    clock = Clock()
    groups = {name: [live_of(name, clock)] for name in ("m", "n")}
    pool = RoutingPool(groups, RoutingRules(num_retries=0), stand_ins={"m": StandIns(("n",))}, clock=clock)
    await pool.settled(5)
    assert await shortest_limit(pool.route(RouteRequest("m"))) == 3.0


@pytest.mark.parametrize(
    ("failures", "left"),
    [([], 2), ([BackendTimeout("slow")], 1), ([ContextTooLong("long")], 2), ([BackendTimeout("slow")] * 2, 0)],
    ids=["none", "one", "a prompt that is too long", "all"],
)
async def test_failures_use_up_the_retries(failures: list[UnisonoError], left: int) -> None:
    pool, _ = await known_pool("a", "b", "c", clock=Clock(), rules=RoutingRules(tolerance=BreakerConfig(99)))
    route = pool.route(ASK)
    for failure in failures:
        with await route.place(DEMAND) as place:
            place.failed(failure)
    assert route.retries_left == left


# -- what waits for its first token


async def test_prompts_that_are_not_read_yet_leave_others_more_time() -> None:
    clock = Clock()
    pool, (a, _) = await known_pool("a", live_of("b", clock, order=1), clock=clock)
    long = replace(DEMAND, prompt_tokens=8000)
    with await pool.route(ASK).place(long) as place, await pool.route(ASK).place(DEMAND) as other:
        begin(place)
        assert a.waits.unread_tokens == 8000
        other.record_attempt(0.2, 0.01, 100)
        a.waits.postpone_probes(inf)
        begin(other)
        # Nobody knows how fast it reads. A probe is due after half of the limit.
        assert a.waits.next_probe_at == clock.now + 8100 / 50 / 2
        place.record_first_token()
        assert (a.waits.unread_tokens, len(a.waits)) == (100, 1)
        begin(other)
        assert a.waits.next_probe_at == clock.now + 10.0 / 2
    assert (a.waits.unread_tokens, len(a.waits)) == (0, 0)


async def test_a_limit_that_passes_as_the_first_token_comes_cancels_nothing() -> None:
    pool, (a, _) = await known_pool("a", live_of("b", time.monotonic, order=1), clock=time.monotonic)
    loop = asyncio.get_running_loop()
    with await pool.route(ASK).place(DEMAND), await pool.route(ASK).place(DEMAND) as place:
        begin(place, replace(TIMEOUTS, total_s=0.05))
        async with place.first_token_limit():
            # The timer of the limit is behind this one, in the same turn of the loop.
            came = loop.create_future()
            loop.call_later(0.02, came.set_result, None)
            time.sleep(0.1)
            await came
            place.record_first_token()
            await asyncio.sleep(0.01)
        assert a.generation.last_at(a.clock()) <= a.clock()


@pytest.mark.parametrize("end", ["began", "failed", "took", "left", "next attempt"])
async def test_a_wait_ends_with_its_attempt(end: str) -> None:
    pool, (a,) = await known_pool("a", clock=Clock())
    with await pool.route(ASK).place(DEMAND) as place:
        begin(place)
        assert len(a.waits) == 1
        match end:
            case "began":
                place.record_first_token()
            case "failed":
                place.failed(BackendTimeout("slow"))
            case "took":
                place.record_usage(120)
            case "next attempt":
                begin(place)
                assert len(a.waits) == 1
                place.record_first_token()
            case _:
                pass
        assert len(a.waits) == (end == "left")
    assert (a.waits.unread_tokens, len(a.waits)) == (0, 0)


async def test_the_next_attempt_on_a_place_has_the_longer_prompt() -> None:
    pool, (a, _) = await known_pool("a", "b", clock=Clock())
    with await pool.route(ASK).place(DEMAND) as place:
        assert begin(place).first_token_s == 30.0
        place.record_first_token()
        place.record_usage(30_000)
        # It is cached, as far as anybody can tell, but that may turn out wrong.
        assert begin(place).first_token_s == 300.0
        assert a.waits.unread_tokens == 0


# -- what is learned


async def test_attempts_that_answered_make_a_deployment_warm() -> None:
    clock = Clock()
    pool, (a, _) = await known_pool("a", "b", clock=clock)
    with await pool.route(ASK).place(DEMAND) as place:
        begin(place)
        place.record_attempt(0.5, 0.1)
        place.record_usage(120)
        assert begin(place).first_token_s == 10.0
    assert learned(a) == LearnedTimes(True, 0.5, None, 0.1)
    clock.now += MAX_SAMPLE_AGE_S + 1
    assert not learned(a).is_warm


async def test_attempts_that_were_given_up_are_no_samples() -> None:
    pool, (a,) = await known_pool("a", clock=Clock())
    with await pool.route(ASK).place(DEMAND) as place:
        begin(place)
        place.failed(BackendTimeout("slow"))
    assert learned(a) == LearnedTimes(timeouts=1)


async def test_a_deployment_that_is_gone_is_cold() -> None:
    pool, (a,) = await known_pool("a", clock=Clock())
    with await pool.route(ASK).place(DEMAND) as place:
        place.record_attempt(0.5)
        place.failed(BackendUnavailable("gone"))
    assert learned(a) == LearnedTimes()


async def test_what_was_cached_is_not_taken_for_speed() -> None:
    """A long prompt shows how fast a deployment reads only where it is known how much of it was read."""
    long = replace(DEMAND, prompt_tokens=8192, blocks=tuple(range(64)))
    alone, (a,) = await known_pool("a", clock=Clock())
    with await alone.route(ASK).place(long) as place:
        begin(place)
        place.record_attempt(2.0)
        assert learned(a).s_per_token is None
        place.record_attempt(2.0, read_tokens=4000)
        assert learned(a).s_per_token == 2.0 / 4000
    pool, lives = await known_pool("a", "b", clock=Clock())
    for seconds in (4.0, 0.1):
        with await pool.route(ASK).place(long) as place:
            begin(place)
            place.record_attempt(seconds)
    [warm] = [learned(live) for live in lives if learned(live).is_warm]
    # The second one was read from the cache.
    assert warm.s_per_token == 4.0 / 8192
    assert warm.first_token_s == 0.1


async def test_any_number_of_attempts_takes_bounded_memory() -> None:
    pool, (a,) = await known_pool("a", clock=Clock())
    for _ in range(3 * MAX_SAMPLES):
        with await pool.route(ASK).place(DEMAND) as place:
            begin(place)
            place.record_attempt(0.5)
    assert len(a.times._samples) == MAX_SAMPLES
    assert len(a.waits) == 0


# -- probes


async def test_a_long_wait_makes_a_deployment_due_for_probes() -> None:
    clock = Clock()
    pool, (a, _) = await known_pool("a", "b", clock=clock)
    a.succeeded()
    with await pool.route(ASK).place(DEMAND) as place:
        limit_s = begin(place).first_token_s
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
        place.record_first_token()
        a.succeeded()
        assert not a.stale(clock.now)


async def test_a_short_limit_calls_for_no_probe() -> None:
    clock = Clock()
    pool, (a, _) = await known_pool("a", "b", clock=clock)
    with await pool.route(ASK).place(DEMAND) as place:
        begin(place, Timeouts(first_token_s=0.3))
        clock.now += 0.3
        assert not a.stale(clock.now)


def quick(name: str, first_token_s: float) -> LiveDeployment:
    live = live_of(name, time.monotonic)
    live.become(DeploymentConfig(name, Timeouts(first_token_s=first_token_s)))
    return live


async def test_the_watch_probes_in_time_and_new_requests_go_elsewhere() -> None:
    """The pool's own clock: its next look around would be seconds away."""
    lives = [quick("a", 3.0), quick("b", 3.0)]
    pool, _ = await known_pool(*lives, clock=time.monotonic)
    pool.start()
    await asyncio.sleep(0.05)
    for live in lives:
        live._probed_at -= 5
    with await pool.route(ASK).place(DEMAND) as place:
        slow = next(live for live in lives if live is place.deployment)
        script_of(slow).outcomes = [BackendTimeout("it hangs")]
        begin(place, slow.timeouts)
        async with asyncio.timeout(4):
            while slow.failure is None:
                await asyncio.sleep(0.005)
        for _ in range(4):
            with await pool.route(ASK).place(DEMAND) as other:
                assert other.deployment is not slow
        # The attempt itself goes on.
        assert len(slow.waits) == 1
    await pool.aclose()


async def test_a_failed_probe_tells_the_attempts_that_wait_how_long_they_may() -> None:
    clock = Clock()
    pool, lives = await known_pool("a", "b", clock=clock)
    told: list[float] = []
    with await pool.route(ASK).place(DEMAND) as place:
        slow = next(live for live in lives if live is place.deployment)
        script_of(slow).outcomes = [IDS, BackendTimeout("it hangs")]
        begin(place)
        place.on_failed_probe(told.append)
        clock.now += 50.0
        with pytest.raises(BackendTimeout):
            await slow.check()
        clock.now += 200.0
        with pytest.raises(BackendTimeout):
            await slow.check()
        assert told == [150.0, 0.0]
        place.on_failed_probe(None)
        with pytest.raises(BackendTimeout):
            await slow.check()
        begin(place, elsewhere=False)
        place.on_failed_probe(told.append)
        with pytest.raises(BackendTimeout):
            await slow.check()
        place.record_first_token()
        place.on_failed_probe(told.append)
        assert len(told) == 2


async def test_a_good_probe_tells_nobody() -> None:
    pool, (a, b) = await known_pool("a", "b", clock=Clock())
    told: list[float] = []
    with await pool.route(ASK).place(DEMAND) as place:
        begin(place)
        place.on_failed_probe(told.append)
        await a.check()
        await b.check()
    assert told == []
