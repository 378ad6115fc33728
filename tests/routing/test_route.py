"""Routes: which deployments a request is given one after the other, and when it is given none any more."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

import pytest

from tests.routing.doubles import ASK, DEMAND, IDS, Clock, Script, known_pool, live_of, script_of
from unisono.config import StandIns
from unisono.core.prefix_blocks import BLOCK_TOKENS, blocks_of
from unisono.core.probe import Check, Finding, Probe
from unisono.core.route_protocol import Attempt, FailoverRoute, Prospects, RouteRequest, RouteRequirements
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendProtocolError,
    BackendRejected,
    BackendTimeout,
    BackendUnavailable,
    BackendUnfit,
    ContextTooLong,
    UnisonoError,
    UnknownModel,
    UnsupportedValue,
)
from unisono.routing.circuit_breaker import BreakerConfig, CircuitPhase
from unisono.routing.deployment import LiveDeployment
from unisono.routing.group import RoutingRules
from unisono.routing.policy import ANSWER_WORK
from unisono.routing.pool import RoutingPool
from unisono.routing.queue import QueueConfig

GONE = BackendUnavailable("gone")
RESUMED = replace(DEMAND, resumes=True)
CALM = BreakerConfig(allowed_fails=99)


async def given(route: FailoverRoute, *outcomes: UnisonoError | None, demand: RouteRequirements = DEMAND) -> list[str]:
    """The deployments a route gives when its places end like this, None being a success."""
    names = []
    for outcome in outcomes:
        with await route.place(demand) as place:
            names.append(place.deployment.name)
            if outcome is None:
                place.succeeded()
            else:
                place.failed(outcome)
    return names


def at_rest(live: LiveDeployment) -> bool:
    return (live.candidate.running, live.candidate.tokens, live.candidate.work) == (0, 0, 0)


async def test_a_place_is_counted_while_it_is_held_whatever_happens() -> None:
    pool, (a,) = await known_pool("a", clock=Clock())
    place = await pool.route(ASK).place(DEMAND)
    assert (place.deployment, place.capabilities) == (a, IDS)
    assert (a.candidate.running, a.candidate.tokens) == (1, 100 + 1024)
    with pytest.raises(RuntimeError), place:
        raise RuntimeError
    assert at_rest(a)


LEFT: dict[str, tuple[RouteRequirements, int, int]] = {
    "the answer, whose end nobody knows": (DEMAND, 100 + ANSWER_WORK, ANSWER_WORK),
    "the answer, where it is short": (replace(DEMAND, max_tokens=30), 130, 30),
    "no more where it may be long": (replace(DEMAND, max_tokens=30_000), 100 + ANSWER_WORK, ANSWER_WORK),
}


@pytest.mark.parametrize(("demand", "before", "after"), LEFT.values(), ids=LEFT)
async def test_a_prompt_that_was_read_is_no_work_any_more(demand: RouteRequirements, before: int, after: int) -> None:
    pool, (a,) = await known_pool("a", clock=Clock())
    with await pool.route(ASK).place(demand) as place:
        assert a.candidate.work == before
        tokens = a.candidate.tokens
        for _ in range(2):
            place.record_first_token()
            assert (a.candidate.work, a.candidate.tokens) == (after, tokens)
    assert at_rest(a)
    place.record_first_token()
    assert at_rest(a)


async def test_a_prompt_goes_where_others_were_read_sooner_than_where_one_still_is() -> None:
    clock = Clock()
    pool, lives = await known_pool("a", "b", clock=clock)
    long = RouteRequirements(prompt_tokens=20_000)
    with await pool.route(ASK).place(long) as one, await pool.route(ASK).place(long) as other:
        assert one.deployment is not other.deployment
        one.record_first_token()
        with await pool.route(ASK).place(long) as third, await pool.route(ASK).place(long) as fourth:
            assert third.deployment is one.deployment
            assert fourth.deployment is other.deployment
    assert all(map(at_rest, lives))


def test_an_unknown_model_is_unknown() -> None:
    with pytest.raises(UnknownModel):
        RoutingPool({"m": []}).route(ASK)


async def test_places_without_a_failure_are_on_one_deployment_and_one_try() -> None:
    pool, _ = await known_pool("a", "b", "c", clock=Clock())
    route = pool.route(ASK)
    names = await given(route, None, None, None)
    assert len(set(names)) == 1
    assert list(route.tries) == [Attempt(names[0])]
    assert len({(await given(pool.route(ASK), None))[0] for _ in range(3)}) == 3


async def test_the_same_deployment_is_kept_past_those_who_wait_for_it() -> None:
    pool, _ = await known_pool(live_of("a", Clock(), max_requests=1), clock=Clock())
    route = pool.route(ASK)
    with await route.place(DEMAND):
        waiting = asyncio.create_task(pool.route(ASK).place(DEMAND))
        await asyncio.sleep(0)
    # It was given away when it was left, and comes back before anybody who has not begun.
    other = await waiting
    behind = asyncio.create_task(pool.route(ASK).place(DEMAND))
    await asyncio.sleep(0)
    again = asyncio.create_task(route.place(RESUMED))
    await asyncio.sleep(0)
    with other:
        pass
    with await again:
        assert not behind.done()
    with await behind:
        pass


MOVES: dict[str, tuple[list[UnisonoError | None], int]] = {
    "no failure": ([None], 1),
    "each elsewhere": ([GONE, BackendProtocolError("x"), None], 3),
    "a prompt too long for one": ([ContextTooLong("x"), None], 2),
}


@pytest.mark.parametrize(("outcomes", "deployments"), MOVES.values(), ids=MOVES)
async def test_what_failed_is_tried_elsewhere(outcomes: list[UnisonoError | None], deployments: int) -> None:
    pool, _ = await known_pool("a", "b", "c", clock=Clock())
    route = pool.route(ASK)
    names = await given(route, *outcomes)
    assert len(set(names)) == deployments
    failures = ["" if outcome is None else outcome.code for outcome in outcomes]
    assert list(route.tries) == [Attempt(name, failure) for name, failure in zip(names, failures, strict=True)]


ENDS: dict[str, tuple[list[UnisonoError], RouteRequirements]] = {
    "a wrong request is wrong elsewhere too": ([BackendRejected("x")], DEMAND),
    "and when it goes on": ([BackendRejected("x")], RESUMED),
    "a field that the backend cannot honour": ([UnsupportedValue("x")], DEMAND),
    "as many tries as are configured": ([GONE, GONE, GONE], DEMAND),
    "an answer that kills everything": ([GONE] * 6, RESUMED),
}


@pytest.mark.parametrize(("errors", "demand"), ENDS.values(), ids=ENDS)
async def test_when_there_is_no_other_try(errors: list[UnisonoError], demand: RouteRequirements) -> None:
    pool, lives = await known_pool(*"abcdefgh", clock=Clock())
    route = pool.route(ASK)
    await given(route, *errors, demand=demand)
    with pytest.raises(type(errors[-1])) as raised:
        await route.place(demand)
    assert raised.value is errors[-1]
    assert all(at_rest(live) for live in lives)


async def test_a_failure_with_nowhere_to_go_is_the_answer() -> None:
    pool, _ = await known_pool("a", clock=Clock())
    route = pool.route(ASK)
    for demand in (DEMAND, RESUMED):
        with await route.place(DEMAND) as place:
            assert not route.elsewhere
            place.failed(GONE)
        with pytest.raises(BackendUnavailable) as raised:
            await route.place(demand)
        assert raised.value is GONE
        route = pool.route(ASK)


async def test_an_answer_may_come_back_to_where_it_was() -> None:
    pool, _ = await known_pool("a", "b", clock=Clock(), rules=RoutingRules(tolerance=CALM))
    route = pool.route(ASK)
    names = await given(route, GONE, GONE, GONE, demand=RESUMED)
    assert route.elsewhere
    names += await given(route, None, demand=RESUMED)
    assert names in (["a", "b", "a", "b"], ["b", "a", "b", "a"])


async def test_an_answer_comes_back_even_to_where_others_do_not_go() -> None:
    clock = Clock()
    pool, lives = await known_pool("a", "b", clock=clock, rules=RoutingRules(tolerance=CALM))
    route = pool.route(ASK)
    busy = BackendOverloaded("full", retry_after_s=10.0)
    [first] = await given(route, busy, demand=RESUMED)
    [second] = await given(route, GONE, demand=RESUMED)
    assert {live.name for live in lives if live.phase(clock()) is CircuitPhase.OPEN} == {first} != {second}
    assert route.elsewhere
    assert await given(route, None, demand=RESUMED) == [first]


async def test_behind_a_success_an_answer_goes_on_wherever_it_can() -> None:
    clock = Clock()
    pool, lives = await known_pool("a", "b", clock=clock, rules=RoutingRules(tolerance=CALM))
    route = pool.route(ASK)
    busy = BackendOverloaded("full", retry_after_s=10.0)
    [first, _, again] = await given(route, busy, GONE, None, demand=RESUMED)
    assert again == first
    # It rests still, so that the next stretch is not simply where the last one was.
    assert {live.name for live in lives if live.phase(clock()) is CircuitPhase.OPEN} == {first}
    assert await given(route, None, None, demand=RESUMED)


async def test_a_fresh_request_does_not() -> None:
    pool, _ = await known_pool("a", "b", clock=Clock(), rules=RoutingRules(tolerance=CALM))
    route = pool.route(ASK)
    await given(route, GONE, GONE)
    assert not route.elsewhere
    with pytest.raises(BackendUnavailable):
        await route.place(DEMAND)


async def test_an_answer_does_not_come_back_to_where_it_does_not_fit() -> None:
    for error in (ContextTooLong("x"), BackendUnfit("cannot go on")):
        pool, _ = await known_pool("a", "b", clock=Clock())
        route = pool.route(ASK)
        await given(route, error, demand=RESUMED)
        await given(route, GONE, demand=RESUMED)
        assert not route.elsewhere
        with pytest.raises(BackendUnavailable):
            await route.place(RESUMED)


async def failing(pool: RoutingPool, error: BackendError, requests: int) -> int:
    """Places that so many requests are given when all of them end in `error`."""
    places = 0
    for _ in range(requests):
        route = pool.route(ASK)
        try:
            while True:
                with await route.place(DEMAND) as place:
                    places += 1
                    place.failed(error)
        except BackendError:
            continue
    return places


STORMS: dict[str, tuple[BackendError, range]] = {
    # A tenth more than there were requests, and what lies in reserve.
    "too busy": (BackendOverloaded("x", retry_after_s=0.0), range(100, 122)),
    "too slow": (BackendTimeout("x", retry_after_s=1.0), range(100, 122)),
    # Each has one move for free, until all that there are were found dead.
    "dead": (BackendUnavailable("x", retry_after_s=1.0), range(100, 150)),
}


@pytest.mark.parametrize(("error", "places"), STORMS.values(), ids=STORMS)
async def test_tries_do_not_make_a_storm_of_a_failure(error: BackendError, places: range) -> None:
    pool, _ = await known_pool(*"abcd", clock=Clock())
    assert await failing(pool, error, 100) in places


async def test_one_dead_deployment_costs_nobody_an_answer() -> None:
    pool, _ = await known_pool("a", "b", "c", clock=Clock())
    routes = [pool.route(ASK) for _ in range(60)]
    places = [await route.place(DEMAND) for route in routes]
    dead = [(route, place) for route, place in zip(routes, places, strict=True) if place.deployment.name == "a"]
    assert len(dead) == 20
    for route, place in dead:
        place.failed(GONE)
        place.__exit__(None, None, None)
        assert (await given(route, None))[0] != "a"


async def test_with_the_budget_empty_the_client_is_told_when_to_come_back() -> None:
    pool, _ = await known_pool("a", "b", clock=Clock())
    errors = [BackendTimeout("slow") for _ in range(13)]

    async def one_after_the_other() -> None:
        for error in errors:
            await given(pool.route(ASK), error, None)

    with pytest.raises(BackendTimeout) as raised:
        await one_after_the_other()
    assert raised.value in errors[10:]
    assert raised.value.retry_after_s == 1.0


async def after(route: FailoverRoute, error: UnisonoError) -> Prospects:
    """What a route offers after an attempt on its next place that ended in this way."""
    with await route.place(DEMAND) as place:
        found = route.prospects(error, resumes=False, held=True)
        place.failed(error)
    return found


def permanent() -> BackendError:
    error = BackendError("no such model")
    error.permanent = True
    return error


@pytest.mark.parametrize("errors", [(permanent(), GONE), (GONE, permanent())], ids=["first", "last"])
async def test_after_a_pause_only_a_deployment_whose_failure_passes_is_asked_again(
    errors: Sequence[BackendError],
) -> None:
    pool, _ = await known_pool("a", "b", clock=Clock(), rules=RoutingRules(tolerance=CALM))
    route = pool.route(ASK)
    assert await after(route, errors[0]) == Prospects(available=True)
    assert (await after(route, errors[1])).later_s is not None
    route.retry_failed()
    passed = next(one.deployment for one in route.tries if one.failure == GONE.code)
    assert await given(route, None) == [passed]


async def test_a_deployment_that_is_down_is_a_last_resort() -> None:
    pool, (_, b) = await known_pool("a", live_of("b", Clock()), clock=Clock(), rules=RoutingRules(tolerance=CALM))
    script_of(b).outcomes, b.known = [GONE], None
    with pytest.raises(BackendUnavailable):
        await b.check()
    assert (await after(pool.route(ASK), BackendOverloaded("busy"))).later_s is not None
    assert await after(pool.route(ASK), permanent()) == Prospects(available=True)


async def test_where_no_place_was_to_be_had_there_is_none_without_a_pause() -> None:
    pool, _ = await known_pool("a", "b", clock=Clock(), rules=RoutingRules(tolerance=CALM))
    route = pool.route(ASK)
    assert (await after(route, GONE)).available
    found = route.prospects(GONE, resumes=False, held=False)
    assert not found.available
    assert found.later_s is not None


async def test_who_is_told_to_come_back_does_so_in_time_and_not_at_one_moment() -> None:
    pool, _ = await known_pool("a", clock=Clock(), rules=RoutingRules(tolerance=CALM))
    busy = BackendOverloaded("busy", retry_after_s=4.0)
    pauses = [(await after(pool.route(ASK), busy)).later_s for _ in range(30)]
    assert all(pause is not None and 4.0 <= pause <= 5.0 for pause in pauses)
    assert len(set(pauses)) == 30


@pytest.mark.parametrize(("error", "free"), [(GONE, True), (BackendError("500"), False)], ids=["reset", "500"])
async def test_a_server_that_answers_with_a_failure_is_asked_again_for_a_charge(
    error: BackendError, free: bool
) -> None:
    pool, _ = await known_pool("a", clock=Clock(), rules=RoutingRules(tolerance=CALM))
    again = 0
    for _ in range(30):
        route = pool.route(ASK)
        assert not (await after(route, error)).available
        route.retry_failed()
        with suppress(BackendError):
            await given(route, None)
            again += 1
    assert (again == 30) is free
    assert again >= 10


Stage: TypeAlias = dict[str, Sequence[LiveDeployment]]


async def staged(
    clock: Clock, stand_ins: dict[str, StandIns], rules: RoutingRules | None = None, **terms: int
) -> RoutingPool:
    groups: Stage = {
        "m": [live_of("m1", clock, **terms)],
        "n": [live_of("n1", clock, **terms)],
        "large": [live_of("l1", clock, replace(IDS, context=100_000), **terms)],
    }
    pool = RoutingPool(groups, rules, stand_ins=stand_ins, clock=clock)
    await pool.settled(5)
    return pool


ON_TO_N = {"m": StandIns(fallbacks=("n",)), "n": StandIns(fallbacks=("m",))}


async def test_when_all_of_a_model_failed_another_stands_in() -> None:
    pool = await staged(Clock(), ON_TO_N)
    route = pool.route(ASK)
    assert await given(route, GONE, None) == ["m1", "n1"]


async def test_models_that_stand_in_for_each_other_come_to_an_end() -> None:
    pool = await staged(Clock(), ON_TO_N)
    route = pool.route(ASK)
    assert await given(route, GONE, GONE) == ["m1", "n1"]
    with pytest.raises(BackendUnavailable):
        await route.place(DEMAND)


async def test_a_model_that_is_too_full_is_stood_in_for() -> None:
    pool = await staged(Clock(), ON_TO_N, RoutingRules(bounds=QueueConfig(length=0)), max_requests=1)
    with await pool.route(ASK).place(DEMAND) as place:
        assert place.deployment.name == "m1"
        with await pool.route(ASK).place(DEMAND) as other:
            assert other.deployment.name == "n1"
            with pytest.raises(BackendOverloaded):
                await pool.route(ASK).place(DEMAND)


async def test_a_model_at_rest_is_stood_in_for_unless_the_other_rests_too() -> None:
    clock = Clock()
    pool = await staged(clock, ON_TO_N, RoutingRules(tolerance=BreakerConfig(allowed_fails=0)))
    m1, n1 = (pool.members()[name][0] for name in "mn")
    m1.failed(GONE)
    assert await given(pool.route(ASK), None) == ["n1"]
    n1.failed(GONE)
    assert await given(pool.route(ASK), None) == ["m1"]


TOO_LONG = {"m": StandIns(larger=("large",), fallbacks=("n",))}


async def test_a_prompt_that_is_too_long_goes_to_a_larger_model() -> None:
    pool = await staged(Clock(), TOO_LONG)
    route = pool.route(ASK)
    assert await given(route, ContextTooLong("x"), None) == ["m1", "l1"]
    assert await given(pool.route(ASK), None, demand=RouteRequirements(prompt_tokens=50_000)) == ["l1"]
    assert await given(pool.route(ASK), GONE, None) == ["m1", "n1"]


async def test_a_prompt_that_is_too_long_for_all_is_refused_by_its_own_model() -> None:
    pool = await staged(Clock(), TOO_LONG)
    assert await given(pool.route(ASK), None, demand=RouteRequirements(prompt_tokens=500_000)) == ["m1"]


async def test_what_a_deployment_can_do_is_found_out_before_it_is_given() -> None:
    clock = Clock()
    script = Script(gate=asyncio.Event())
    live = LiveDeployment("a", script, clock=clock)
    pool = RoutingPool({"m": [live]}, clock=clock)
    asked = asyncio.create_task(pool.route(ASK).place(DEMAND))
    await asyncio.sleep(0.01)
    assert at_rest(live)
    assert script.gate is not None
    script.gate.set()
    with await asked as place:
        assert place.capabilities == IDS
    assert script.probes == 1


async def test_nobody_waits_for_a_probe_that_hangs_while_another_is_known() -> None:
    clock = Clock()
    hanging, other = LiveDeployment("a", Script(gate=asyncio.Event()), clock=clock), live_of("b", clock)
    pool = RoutingPool({"m": [hanging, other]}, clock=clock)
    asked = [asyncio.create_task(pool.route(ASK).place(DEMAND)) for _ in range(4)]
    await asyncio.sleep(0.01)
    await other.check()
    for place in await asyncio.gather(*asked):
        with place:
            assert place.deployment.name == "b"


WRONG = Probe(IDS, (Finding(Check.TOKENIZER, ok=False),))


async def test_what_keeps_everything_from_being_used_is_the_answer() -> None:
    for outcome, error in ((GONE, BackendUnavailable), (WRONG, BackendUnfit)):
        clock = Clock()
        lives = [LiveDeployment(name, Script([outcome]), clock=clock) for name in "ab"]
        pool = RoutingPool({"m": lives}, clock=clock)
        for _ in range(2):
            with pytest.raises(error):
                await pool.route(ASK).place(DEMAND)
        assert [script_of(live).probes for live in lives] == [1, 1]


async def test_one_that_is_unfit_is_never_given_while_another_works() -> None:
    clock = Clock()
    unfit = LiveDeployment("a", Script([WRONG]), clock=clock)
    pool, _ = await known_pool(unfit, "b", clock=clock)
    assert {name for _ in range(6) for name in await given(pool.route(ASK), None)} == {"b"}
    route = pool.route(ASK)
    await given(route, GONE)
    assert not route.elsewhere


async def test_one_that_was_unfit_and_is_the_only_one_is_asked_again() -> None:
    clock = Clock()
    live = LiveDeployment("a", Script([WRONG, IDS]), clock=clock)
    pool = RoutingPool({"m": [live]}, clock=clock)
    with pytest.raises(BackendUnfit):
        await pool.route(ASK).place(DEMAND)
    clock.now += 3
    assert await given(pool.route(ASK), None) == ["a"]


async def test_requests_go_around_one_at_rest_and_come_back_when_probes_found_it_well() -> None:
    clock = Clock()
    pool, (a, b) = await known_pool("a", "b", clock=clock, rules=RoutingRules(tolerance=BreakerConfig(0, 30.0)))
    a.failed(GONE)
    assert {name for _ in range(4) for name in await given(pool.route(ASK), None)} == {"b"}
    clock.now += 40
    assert {name for _ in range(4) for name in await given(pool.route(ASK), None)} == {"b"}
    for _ in range(2):
        await a.check()
    assert {name for _ in range(4) for name in await given(pool.route(ASK), None)} == {"a", "b"}
    b.failed(GONE)
    a.failed(GONE)
    assert {name for _ in range(4) for name in await given(pool.route(ASK), None)} <= {"a", "b"}


async def test_a_prompt_goes_where_its_beginning_was_and_nowhere_in_particular_once_that_died() -> None:
    clock = Clock()
    pool, _ = await known_pool("a", "b", "c", clock=clock)
    tokens = list(range(40 * BLOCK_TOKENS))
    first, longer = blocks_of(tokens[: 20 * BLOCK_TOKENS]), blocks_of(tokens)
    other = RouteRequirements(2000, blocks_of([7] * 2000))
    route = pool.route(ASK)
    (home,) = await given(route, None, demand=RouteRequirements(20 * BLOCK_TOKENS, first))
    for _ in range(3):
        await given(pool.route(ASK), None, demand=other)
        assert await given(pool.route(ASK), None, demand=RouteRequirements(40 * BLOCK_TOKENS, longer)) == [home]
    assert await given(pool.route(ASK), GONE, None, demand=RouteRequirements(40 * BLOCK_TOKENS, longer)) != [home]
    (elsewhere,) = await given(pool.route(ASK), None, demand=RouteRequirements(40 * BLOCK_TOKENS, longer))
    assert elsewhere != home


async def test_a_conversation_keeps_its_deployment_in_every_process() -> None:
    homes = []
    for _ in range(2):
        pool, _ = await known_pool("a", "b", "c", clock=Clock())
        homes.append([(await given(pool.route(RouteRequest("m", sticky=f"conv_{n}")), None))[0] for n in range(12)])
    assert homes[0] == homes[1]
    assert set(homes[0]) == {"a", "b", "c"}


async def test_a_client_that_leaves_the_line_or_a_probe_leaves_nothing_behind() -> None:
    clock = Clock()
    pool, (a,) = await known_pool(live_of("a", clock, max_requests=1), clock=clock)
    with await pool.route(ASK).place(DEMAND):
        waiting = [asyncio.create_task(pool.route(ASK).place(DEMAND)) for _ in range(3)]
        await asyncio.sleep(0)
        assert pool.status()[0].waiting == 3
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (pool.status()[0].waiting, a.candidate.running) == (0, 1)
    assert at_rest(a)
    gated = LiveDeployment("b", Script(gate=asyncio.Event()), clock=clock)
    probing = RoutingPool({"m": [gated]}, clock=clock)
    asked = asyncio.create_task(probing.route(ASK).place(DEMAND))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert at_rest(gated)
    await probing.aclose()


async def test_those_who_wait_are_served_elsewhere_when_their_deployment_dies() -> None:
    clock = Clock()
    rules = RoutingRules(tolerance=BreakerConfig(allowed_fails=0))
    pool, (a, b) = await known_pool(
        live_of("a", clock, max_requests=1), live_of("b", clock, max_requests=1), clock=clock, rules=rules
    )
    first, second = [await pool.route(ASK).place(DEMAND) for _ in range(2)]
    waiting = asyncio.create_task(pool.route(ASK).place(DEMAND))
    await asyncio.sleep(0)
    script_of(a).outcomes = [GONE]
    script_of(b).outcomes = [GONE]
    for place in (first, second):
        place.failed(GONE)
        place.__exit__(None, None, None)
    with pytest.raises(BackendUnavailable):
        await waiting
    assert at_rest(a)
    assert at_rest(b)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_no_place_is_lost_and_limits_hold(seed: int) -> None:
    chance = random.Random(seed)
    clock = Clock()
    lives = [
        live_of("a", clock, max_requests=2),
        live_of("b", clock, max_tokens=3000),
        live_of("c", clock, max_requests=3, max_tokens=4000, order=1),
    ]
    rules = RoutingRules(bounds=QueueConfig(length=8, timeout_s=0.05), tolerance=BreakerConfig(1, 5.0))
    pool, _ = await known_pool(*lives, clock=clock, rules=rules)
    errors = [GONE, BackendTimeout("x"), BackendOverloaded("x", retry_after_s=1.0), ContextTooLong("x"), None, None]

    async def request(owner: str) -> None:
        route = pool.route(RouteRequest("m", owner))
        for step in range(chance.randint(1, 4)):
            demand = RouteRequirements(chance.choice([100, 1500, 5000]), max_tokens=200, resumes=step > 0)
            with await route.place(demand) as place:
                for live in lives:
                    one = live.candidate
                    assert one.max_requests is None or one.running <= one.max_requests
                    assert one.max_tokens is None or one.running == 1 or one.tokens <= one.max_tokens
                await asyncio.sleep(chance.random() * 0.003)
                error = chance.choice(errors)
                if error is not None:
                    place.failed(error)
                else:
                    place.succeeded()

    tasks = []
    for _ in range(80):
        tasks.append(asyncio.create_task(request(chance.choice("xyz"))))
        if chance.random() < 0.3:
            await asyncio.sleep(0.002)
            clock.now += chance.random()
        if chance.random() < 0.2:
            chance.choice(tasks).cancel()
    async with asyncio.timeout(20):
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [one for one in outcomes if isinstance(one, Exception) and not isinstance(one, UnisonoError)]
    assert all(at_rest(live) for live in lives)
    assert pool.status()[0].waiting == 0
