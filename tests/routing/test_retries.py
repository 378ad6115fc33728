"""Failover routes: the sequence of deployments for a request, and its end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

import pytest

from tests.routing.doubles import IDS, REQUEST, REQUIREMENTS, Clock, ScriptedBackend, known_pool, live_of, script_of
from unisono.core.fallback_models import FallbackModels
from unisono.core.probe import Check, Finding, Probe
from unisono.core.route_protocol import (
    BLOCK_TOKENS,
    Attempt,
    FailoverRoute,
    Prospects,
    RouteRequest,
    RouteRequirements,
    blocks_of,
)
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
from unisono.routing.deployment_choice import ANSWER_WORK
from unisono.routing.group import RoutingRules
from unisono.routing.pool import RoutingPool
from unisono.routing.queue import QueueConfig

GONE = BackendUnavailable("gone")
RESUMED = replace(REQUIREMENTS, resumes=True)
TOLERANT = BreakerConfig(allowed_fails=99)


async def run_attempts(
    route: FailoverRoute, *outcomes: UnisonoError | None, demand: RouteRequirements = REQUIREMENTS
) -> list[str]:
    """Return the deployments of a route whose slots end with these outcomes; None is a success."""
    names = []
    for outcome in outcomes:
        with await route.next_slot(demand) as slot:
            names.append(slot.deployment.name)
            if outcome is None:
                slot.succeeded()
            else:
                slot.failed(outcome)
    return names


def is_idle(live: LiveDeployment) -> bool:
    return (live.candidate.running, live.candidate.tokens, live.candidate.work) == (0, 0, 0)


async def test_a_slot_is_counted_until_its_release() -> None:
    pool, (a,) = await known_pool("a", clock=Clock())
    slot = await pool.route(REQUEST).next_slot(REQUIREMENTS)
    assert (slot.deployment, slot.capabilities) == (a, IDS)
    assert (a.candidate.running, a.candidate.tokens) == (1, 100 + 1024)
    with pytest.raises(RuntimeError), slot:
        raise RuntimeError
    assert is_idle(a)


TAKEN_OVER = replace(REQUEST, is_taken_over=True)


@pytest.mark.parametrize("is_probed", [True, False], ids=["probed", "not probed yet"])
async def test_an_answer_of_another_process_may_use_a_drained_deployment(is_probed: bool) -> None:
    clock = Clock()
    lives = [live_of("a", clock, is_drained=True)]
    pool = RoutingPool({"m": lives}, clock=clock)
    if is_probed:
        await pool.wait_for_probes(5)
    with pytest.raises(BackendUnavailable):
        await pool.route(REQUEST).next_slot(REQUIREMENTS)
    route = pool.route(TAKEN_OVER)
    assert await run_attempts(route, None, GONE) == ["a", "a"]
    assert [*route.tries] == [Attempt("a", "backend_unavailable")]
    with pytest.raises(BackendUnavailable):
        await route.next_slot(RESUMED)
    assert is_idle(lives[0])


async def test_an_answer_of_another_process_prefers_deployments_that_work() -> None:
    clock = Clock()
    pool, (gone, drained, working) = await known_pool(
        live_of("gone", clock, is_drained=True), live_of("drained", clock, is_drained=True), "working", clock=clock
    )
    assert await run_attempts(pool.route(TAKEN_OVER), None) == ["working"]
    for live in (gone, working):
        script_of(live).outcomes = [GONE]
        with suppress(BackendUnavailable):
            await live.check()
    assert await run_attempts(pool.route(TAKEN_OVER), None) == ["drained"]
    assert drained.candidate.running == 0


async def test_an_answer_of_another_process_uses_no_drained_deployment_that_its_request_excludes() -> None:
    clock = Clock()
    pool, lives = await known_pool(live_of("a", clock, is_drained=True), live_of("b", clock), clock=clock)
    script_of(lives[1]).outcomes = [GONE]
    with suppress(BackendUnavailable):
        await lives[1].check()
    route = pool.route(replace(TAKEN_OVER, excluded=frozenset({"a"})))
    assert await run_attempts(route, None) == ["b"]


REMAINING_WORK: dict[str, tuple[RouteRequirements, int, int]] = {
    "no answer limit": (REQUIREMENTS, 100 + ANSWER_WORK, ANSWER_WORK),
    "short answer limit": (replace(REQUIREMENTS, max_tokens=30), 130, 30),
    "long answer limit": (replace(REQUIREMENTS, max_tokens=30_000), 100 + ANSWER_WORK, ANSWER_WORK),
}


@pytest.mark.parametrize(("demand", "work_before", "work_after"), REMAINING_WORK.values(), ids=REMAINING_WORK)
async def test_a_read_prompt_no_longer_counts_as_work(
    demand: RouteRequirements, work_before: int, work_after: int
) -> None:
    pool, (a,) = await known_pool("a", clock=Clock())
    with await pool.route(REQUEST).next_slot(demand) as slot:
        assert a.candidate.work == work_before
        tokens = a.candidate.tokens
        for _ in range(2):
            slot.record_first_token()
            assert (a.candidate.work, a.candidate.tokens) == (work_after, tokens)
    assert is_idle(a)
    slot.record_first_token()
    assert is_idle(a)


async def test_a_prompt_prefers_a_deployment_without_unread_prompts() -> None:
    clock = Clock()
    pool, lives = await known_pool("a", "b", clock=clock)
    long = RouteRequirements(prompt_tokens=20_000)
    with await pool.route(REQUEST).next_slot(long) as one, await pool.route(REQUEST).next_slot(long) as other:
        assert one.deployment is not other.deployment
        one.record_first_token()
        with await pool.route(REQUEST).next_slot(long) as third, await pool.route(REQUEST).next_slot(long) as fourth:
            assert third.deployment is one.deployment
            assert fourth.deployment is other.deployment
    assert all(map(is_idle, lives))


def test_an_unknown_model_raises_unknown_model() -> None:
    with pytest.raises(UnknownModel):
        RoutingPool({"m": []}).route(REQUEST)


async def test_slots_without_a_failure_stay_on_one_deployment() -> None:
    pool, _ = await known_pool("a", "b", "c", clock=Clock())
    route = pool.route(REQUEST)
    names = await run_attempts(route, None, None, None)
    assert len(set(names)) == 1
    assert list(route.tries) == [Attempt(names[0])]
    assert len({(await run_attempts(pool.route(REQUEST), None))[0] for _ in range(3)}) == 3


async def test_a_resumed_answer_passes_waiting_requests() -> None:
    pool, _ = await known_pool(live_of("a", Clock(), max_requests=1), clock=Clock())
    route = pool.route(REQUEST)
    with await route.next_slot(REQUIREMENTS):
        waiting = asyncio.create_task(pool.route(REQUEST).next_slot(REQUIREMENTS))
        await asyncio.sleep(0)
        assert not waiting.done()
    # The released slot went to the waiting request. The resumed answer gets it next, before new requests.
    other = await waiting
    new_request = asyncio.create_task(pool.route(REQUEST).next_slot(REQUIREMENTS))
    await asyncio.sleep(0)
    again = asyncio.create_task(route.next_slot(RESUMED))
    await asyncio.sleep(0)
    assert not new_request.done()
    assert not again.done()
    with other:
        pass
    [first], _ = await asyncio.wait([new_request, again], timeout=5, return_when=asyncio.FIRST_COMPLETED)
    assert first is again
    with await again:
        await asyncio.sleep(0)
        assert not new_request.done()
    async with asyncio.timeout(5):
        with await new_request:
            pass


async def test_a_request_that_fits_does_not_pass_waiting_requests() -> None:
    pool, _ = await known_pool(live_of("a", Clock(), max_tokens=1000), clock=Clock())
    large, small = RouteRequirements(600, max_tokens=0), RouteRequirements(100, max_tokens=0)
    with await pool.route(REQUEST).next_slot(large):
        first = asyncio.create_task(pool.route(REQUEST).next_slot(large))
        await asyncio.sleep(0)
        second = asyncio.create_task(pool.route(REQUEST).next_slot(small))
        await asyncio.sleep(0)
        assert not first.done()
        assert not second.done()
    async with asyncio.timeout(5):
        with await first, await second:
            pass


MOVES: dict[str, tuple[list[UnisonoError | None], int]] = {
    "no failure": ([None], 1),
    "two failures": ([GONE, BackendProtocolError("x"), None], 3),
    "prompt too long for one deployment": ([ContextTooLong("x"), None], 2),
}


@pytest.mark.parametrize(("outcomes", "deployments"), MOVES.values(), ids=MOVES)
async def test_a_failed_attempt_is_retried_on_another_deployment(
    outcomes: list[UnisonoError | None], deployments: int
) -> None:
    pool, _ = await known_pool("a", "b", "c", clock=Clock())
    route = pool.route(REQUEST)
    names = await run_attempts(route, *outcomes)
    assert len(set(names)) == deployments
    failures = ["" if outcome is None else outcome.code for outcome in outcomes]
    assert list(route.tries) == [Attempt(name, failure) for name, failure in zip(names, failures, strict=True)]


ENDS: dict[str, tuple[list[UnisonoError], RouteRequirements]] = {
    "rejected request": ([BackendRejected("x")], REQUIREMENTS),
    "rejected resumed answer": ([BackendRejected("x")], RESUMED),
    "unsupported value": ([UnsupportedValue("x")], REQUIREMENTS),
    "all configured attempts failed": ([GONE, GONE, GONE], REQUIREMENTS),
    "resumed answer with too many failures": ([GONE] * 6, RESUMED),
}


@pytest.mark.parametrize(("errors", "demand"), ENDS.values(), ids=ENDS)
async def test_the_last_error_is_raised_without_another_attempt(
    errors: list[UnisonoError], demand: RouteRequirements
) -> None:
    pool, lives = await known_pool(*"abcdefgh", clock=Clock())
    route = pool.route(REQUEST)
    await run_attempts(route, *errors, demand=demand)
    with pytest.raises(type(errors[-1])) as raised:
        await route.next_slot(demand)
    assert raised.value is errors[-1]
    assert all(is_idle(live) for live in lives)


async def test_the_error_of_a_single_deployment_is_raised() -> None:
    pool, _ = await known_pool("a", clock=Clock())
    route = pool.route(REQUEST)
    for demand in (REQUIREMENTS, RESUMED):
        with await route.next_slot(REQUIREMENTS) as slot:
            assert not route.elsewhere
            slot.failed(GONE)
        with pytest.raises(BackendUnavailable) as raised:
            await route.next_slot(demand)
        assert raised.value is GONE
        route = pool.route(REQUEST)


async def test_a_resumed_answer_may_return_to_a_failed_deployment() -> None:
    pool, _ = await known_pool("a", "b", clock=Clock(), rules=RoutingRules(tolerance=TOLERANT))
    route = pool.route(REQUEST)
    names = await run_attempts(route, GONE, GONE, GONE, demand=RESUMED)
    assert route.elsewhere
    names += await run_attempts(route, None, demand=RESUMED)
    assert names in (["a", "b", "a", "b"], ["b", "a", "b", "a"])


async def test_a_resumed_answer_may_return_to_a_deployment_in_cooldown() -> None:
    clock = Clock()
    pool, lives = await known_pool("a", "b", clock=clock, rules=RoutingRules(tolerance=TOLERANT))
    route = pool.route(REQUEST)
    busy = BackendOverloaded("full", retry_after_s=10.0)
    [first] = await run_attempts(route, busy, demand=RESUMED)
    [second] = await run_attempts(route, GONE, demand=RESUMED)
    assert {live.name for live in lives if live.phase(clock()) is CircuitPhase.OPEN} == {first} != {second}
    assert route.elsewhere
    assert await run_attempts(route, None, demand=RESUMED) == [first]


async def test_an_answer_continues_on_any_deployment_after_a_success() -> None:
    clock = Clock()
    pool, lives = await known_pool("a", "b", clock=clock, rules=RoutingRules(tolerance=TOLERANT))
    route = pool.route(REQUEST)
    busy = BackendOverloaded("full", retry_after_s=10.0)
    [first, _, again] = await run_attempts(route, busy, GONE, None, demand=RESUMED)
    assert again == first
    # The first deployment is still in its cooldown, so that the next slot needs a new choice.
    assert {live.name for live in lives if live.phase(clock()) is CircuitPhase.OPEN} == {first}
    assert await run_attempts(route, None, None, demand=RESUMED)


async def test_a_new_request_does_not_return_to_a_failed_deployment() -> None:
    pool, _ = await known_pool("a", "b", clock=Clock(), rules=RoutingRules(tolerance=TOLERANT))
    route = pool.route(REQUEST)
    await run_attempts(route, GONE, GONE)
    assert not route.elsewhere
    with pytest.raises(BackendUnavailable):
        await route.next_slot(REQUIREMENTS)


async def test_a_resumed_answer_does_not_return_to_an_unfit_deployment() -> None:
    for error in (ContextTooLong("x"), BackendUnfit("cannot go on")):
        pool, _ = await known_pool("a", "b", clock=Clock())
        route = pool.route(REQUEST)
        await run_attempts(route, error, demand=RESUMED)
        await run_attempts(route, GONE, demand=RESUMED)
        assert not route.elsewhere
        with pytest.raises(BackendUnavailable):
            await route.next_slot(RESUMED)


async def failing(pool: RoutingPool, error: BackendError, requests: int) -> int:
    """Return the number of slots for `requests` requests that all fail with `error`."""
    attempts = 0
    for _ in range(requests):
        route = pool.route(REQUEST)
        try:
            while True:
                with await route.next_slot(REQUIREMENTS) as slot:
                    attempts += 1
                    slot.failed(error)
        except BackendError:
            continue
    return attempts


OUTAGES: dict[str, tuple[BackendError, range]] = {
    # A tenth more than the requests, and the reserve.
    "overloaded": (BackendOverloaded("x", retry_after_s=0.0), range(100, 122)),
    "timeout": (BackendTimeout("x", retry_after_s=1.0), range(100, 122)),
    # Each request has one free failover until all deployments are known to be down.
    "unreachable": (BackendUnavailable("x", retry_after_s=1.0), range(100, 150)),
}


@pytest.mark.parametrize(("error", "attempts"), OUTAGES.values(), ids=OUTAGES)
async def test_the_retry_budget_limits_attempts_in_an_outage(error: BackendError, attempts: range) -> None:
    pool, _ = await known_pool(*"abcd", clock=Clock())
    assert await failing(pool, error, 100) in attempts


async def test_a_dead_deployment_fails_no_request() -> None:
    pool, _ = await known_pool("a", "b", "c", clock=Clock())
    routes = [pool.route(REQUEST) for _ in range(60)]
    slots = [await route.next_slot(REQUIREMENTS) for route in routes]
    dead = [(route, slot) for route, slot in zip(routes, slots, strict=True) if slot.deployment.name == "a"]
    assert len(dead) == 20
    for route, slot in dead:
        slot.failed(GONE)
        slot.__exit__(None, None, None)
        assert (await run_attempts(route, None))[0] != "a"


async def test_an_exhausted_retry_budget_sets_retry_after() -> None:
    pool, _ = await known_pool("a", "b", clock=Clock())
    errors = [BackendTimeout("slow") for _ in range(13)]

    async def fail_each_request() -> None:
        for error in errors:
            await run_attempts(pool.route(REQUEST), error, None)

    with pytest.raises(BackendTimeout) as raised:
        await fail_each_request()
    assert raised.value in errors[10:]
    assert raised.value.retry_after_s == 1.0


async def prospects_after(route: FailoverRoute, error: UnisonoError) -> Prospects:
    """Return the prospects of a route after a failed attempt on its next slot."""
    with await route.next_slot(REQUIREMENTS) as slot:
        prospects = route.prospects(error, resumes=False, held=True)
        slot.failed(error)
    return prospects


def permanent() -> BackendError:
    error = BackendError("no such model")
    error.permanent = True
    return error


@pytest.mark.parametrize("errors", [(permanent(), GONE), (GONE, permanent())], ids=["first", "last"])
async def test_only_a_deployment_with_a_temporary_failure_is_retried_after_a_pause(
    errors: Sequence[BackendError],
) -> None:
    pool, _ = await known_pool("a", "b", clock=Clock(), rules=RoutingRules(tolerance=TOLERANT))
    route = pool.route(REQUEST)
    assert await prospects_after(route, errors[0]) == Prospects(available=True)
    assert (await prospects_after(route, errors[1])).later_s is not None
    route.retry_failed()
    temporary = next(one.deployment for one in route.tries if one.failure == GONE.code)
    assert await run_attempts(route, None) == [temporary]


async def test_a_deployment_that_is_down_is_a_last_resort() -> None:
    pool, (_, b) = await known_pool("a", live_of("b", Clock()), clock=Clock(), rules=RoutingRules(tolerance=TOLERANT))
    script_of(b).outcomes, b.known = [GONE], None
    with pytest.raises(BackendUnavailable):
        await b.check()
    assert (await prospects_after(pool.route(REQUEST), BackendOverloaded("busy"))).later_s is not None
    assert await prospects_after(pool.route(REQUEST), permanent()) == Prospects(available=True)


async def test_without_a_free_slot_an_attempt_needs_a_pause() -> None:
    pool, _ = await known_pool("a", "b", clock=Clock(), rules=RoutingRules(tolerance=TOLERANT))
    route = pool.route(REQUEST)
    assert (await prospects_after(route, GONE)).available
    prospects = route.prospects(GONE, resumes=False, held=False)
    assert not prospects.available
    assert prospects.later_s is not None


async def test_pauses_follow_retry_after_with_jitter() -> None:
    pool, _ = await known_pool("a", clock=Clock(), rules=RoutingRules(tolerance=TOLERANT))
    busy = BackendOverloaded("busy", retry_after_s=4.0)
    pauses = [(await prospects_after(pool.route(REQUEST), busy)).later_s for _ in range(30)]
    assert all(pause is not None and 4.0 <= pause <= 5.0 for pause in pauses)
    assert len(set(pauses)) == 30


@pytest.mark.parametrize(
    ("error", "is_free"), [(GONE, True), (BackendError("500"), False)], ids=["connection reset", "server error"]
)
async def test_a_retry_after_a_server_error_is_paid_from_the_budget(error: BackendError, is_free: bool) -> None:
    pool, _ = await known_pool("a", clock=Clock(), rules=RoutingRules(tolerance=TOLERANT))
    retries = 0
    for _ in range(30):
        route = pool.route(REQUEST)
        assert not (await prospects_after(route, error)).available
        route.retry_failed()
        with suppress(BackendError):
            await run_attempts(route, None)
            retries += 1
    assert (retries == 30) is is_free
    assert retries >= 10


Groups: TypeAlias = dict[str, Sequence[LiveDeployment]]


async def pool_with_fallbacks(
    clock: Clock, fallback_models: dict[str, FallbackModels], rules: RoutingRules | None = None, **terms: int
) -> RoutingPool:
    groups: Groups = {
        "m": [live_of("m1", clock, **terms)],
        "n": [live_of("n1", clock, **terms)],
        "large": [live_of("l1", clock, replace(IDS, context=100_000), **terms)],
    }
    pool = RoutingPool(groups, rules, fallback_models=fallback_models, clock=clock)
    await pool.wait_for_probes(5)
    return pool


MUTUAL_FALLBACKS = {"m": FallbackModels(fallbacks=("n",)), "n": FallbackModels(fallbacks=("m",))}


async def test_a_fallback_model_is_used_after_all_deployments_failed() -> None:
    pool = await pool_with_fallbacks(Clock(), MUTUAL_FALLBACKS)
    route = pool.route(REQUEST)
    assert await run_attempts(route, GONE, None) == ["m1", "n1"]


async def test_mutual_fallbacks_end_after_one_round() -> None:
    pool = await pool_with_fallbacks(Clock(), MUTUAL_FALLBACKS)
    route = pool.route(REQUEST)
    assert await run_attempts(route, GONE, GONE) == ["m1", "n1"]
    with pytest.raises(BackendUnavailable):
        await route.next_slot(REQUIREMENTS)


async def test_a_fallback_model_is_used_for_a_full_model() -> None:
    pool = await pool_with_fallbacks(
        Clock(), MUTUAL_FALLBACKS, RoutingRules(bounds=QueueConfig(length=0)), max_requests=1
    )
    with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        assert slot.deployment.name == "m1"
        with await pool.route(REQUEST).next_slot(REQUIREMENTS) as other:
            assert other.deployment.name == "n1"
            with pytest.raises(BackendOverloaded):
                await pool.route(REQUEST).next_slot(REQUIREMENTS)


async def test_a_fallback_model_is_used_during_a_cooldown() -> None:
    clock = Clock()
    pool = await pool_with_fallbacks(clock, MUTUAL_FALLBACKS, RoutingRules(tolerance=BreakerConfig(allowed_fails=0)))
    m1, n1 = (pool.members()[name][0] for name in "mn")
    m1.failed(GONE)
    assert await run_attempts(pool.route(REQUEST), None) == ["n1"]
    n1.failed(GONE)
    assert await run_attempts(pool.route(REQUEST), None) == ["m1"]


TOO_LONG = {"m": FallbackModels(larger=("large",), fallbacks=("n",))}


async def test_a_long_prompt_falls_back_to_a_larger_model() -> None:
    pool = await pool_with_fallbacks(Clock(), TOO_LONG)
    route = pool.route(REQUEST)
    assert await run_attempts(route, ContextTooLong("x"), None) == ["m1", "l1"]
    assert await run_attempts(pool.route(REQUEST), None, demand=RouteRequirements(prompt_tokens=50_000)) == ["l1"]
    assert await run_attempts(pool.route(REQUEST), GONE, None) == ["m1", "n1"]


async def test_a_prompt_too_long_for_all_models_goes_to_its_own_model() -> None:
    pool = await pool_with_fallbacks(Clock(), TOO_LONG)
    assert await run_attempts(pool.route(REQUEST), None, demand=RouteRequirements(prompt_tokens=500_000)) == ["m1"]


async def test_an_unknown_deployment_is_probed_before_use() -> None:
    clock = Clock()
    script = ScriptedBackend(gate=asyncio.Event())
    live = LiveDeployment("a", script, clock=clock)
    pool = RoutingPool({"m": [live]}, clock=clock)
    pending = asyncio.create_task(pool.route(REQUEST).next_slot(REQUIREMENTS))
    await asyncio.sleep(0.01)
    assert is_idle(live)
    assert script.gate is not None
    script.gate.set()
    with await pending as slot:
        assert slot.capabilities == IDS
    assert script.probes == 1


async def test_a_hanging_probe_does_not_delay_requests_for_known_deployments() -> None:
    clock = Clock()
    hanging, other = LiveDeployment("a", ScriptedBackend(gate=asyncio.Event()), clock=clock), live_of("b", clock)
    pool = RoutingPool({"m": [hanging, other]}, clock=clock)
    pending = [asyncio.create_task(pool.route(REQUEST).next_slot(REQUIREMENTS)) for _ in range(4)]
    await asyncio.sleep(0.01)
    await other.check()
    for slot in await asyncio.gather(*pending):
        with slot:
            assert slot.deployment.name == "b"


WRONG = Probe(IDS, (Finding(Check.TOKENIZER, ok=False),))


async def test_the_probe_error_is_raised_if_no_deployment_is_usable() -> None:
    for outcome, error in ((GONE, BackendUnavailable), (WRONG, BackendUnfit)):
        clock = Clock()
        lives = [LiveDeployment(name, ScriptedBackend([outcome]), clock=clock) for name in "ab"]
        pool = RoutingPool({"m": lives}, clock=clock)
        for _ in range(2):
            with pytest.raises(error):
                await pool.route(REQUEST).next_slot(REQUIREMENTS)
        assert [script_of(live).probes for live in lives] == [1, 1]


async def test_an_unfit_deployment_is_never_used_beside_a_working_one() -> None:
    clock = Clock()
    unfit = LiveDeployment("a", ScriptedBackend([WRONG]), clock=clock)
    pool, _ = await known_pool(unfit, "b", clock=clock)
    assert {name for _ in range(6) for name in await run_attempts(pool.route(REQUEST), None)} == {"b"}
    route = pool.route(REQUEST)
    await run_attempts(route, GONE)
    assert not route.elsewhere


async def test_the_only_deployment_is_probed_again_if_unfit() -> None:
    clock = Clock()
    live = LiveDeployment("a", ScriptedBackend([WRONG, IDS]), clock=clock)
    pool = RoutingPool({"m": [live]}, clock=clock)
    with pytest.raises(BackendUnfit):
        await pool.route(REQUEST).next_slot(REQUIREMENTS)
    clock.now += 3
    assert await run_attempts(pool.route(REQUEST), None) == ["a"]


async def test_a_deployment_in_cooldown_is_used_again_after_probes() -> None:
    clock = Clock()
    pool, (a, b) = await known_pool("a", "b", clock=clock, rules=RoutingRules(tolerance=BreakerConfig(0, 30.0)))
    a.failed(GONE)
    assert {name for _ in range(4) for name in await run_attempts(pool.route(REQUEST), None)} == {"b"}
    clock.now += 40
    assert {name for _ in range(4) for name in await run_attempts(pool.route(REQUEST), None)} == {"b"}
    for _ in range(2):
        await a.check()
    assert {name for _ in range(4) for name in await run_attempts(pool.route(REQUEST), None)} == {"a", "b"}
    b.failed(GONE)
    a.failed(GONE)
    assert {name for _ in range(4) for name in await run_attempts(pool.route(REQUEST), None)} <= {"a", "b"}


async def test_a_prompt_goes_to_its_cached_prefix_until_that_deployment_fails() -> None:
    clock = Clock()
    pool, _ = await known_pool("a", "b", "c", clock=clock)
    tokens = list(range(40 * BLOCK_TOKENS))
    first, longer = blocks_of(tokens[: 20 * BLOCK_TOKENS]), blocks_of(tokens)
    other = RouteRequirements(2000, blocks_of([7] * 2000))
    route = pool.route(REQUEST)
    (cached_on,) = await run_attempts(route, None, demand=RouteRequirements(20 * BLOCK_TOKENS, first))
    for _ in range(3):
        await run_attempts(pool.route(REQUEST), None, demand=other)
        assert await run_attempts(pool.route(REQUEST), None, demand=RouteRequirements(40 * BLOCK_TOKENS, longer)) == [
            cached_on
        ]
    assert await run_attempts(pool.route(REQUEST), GONE, None, demand=RouteRequirements(40 * BLOCK_TOKENS, longer)) != [
        cached_on
    ]
    (elsewhere,) = await run_attempts(pool.route(REQUEST), None, demand=RouteRequirements(40 * BLOCK_TOKENS, longer))
    assert elsewhere != cached_on


async def test_a_conversation_keeps_its_deployment_in_every_process() -> None:
    homes = []
    for _ in range(2):
        pool, _ = await known_pool("a", "b", "c", clock=Clock())
        homes.append(
            [(await run_attempts(pool.route(RouteRequest("m", sticky=f"conv_{n}")), None))[0] for n in range(12)]
        )
    assert homes[0] == homes[1]
    assert set(homes[0]) == {"a", "b", "c"}


async def test_a_cancelled_request_releases_its_queue_entry_and_slot() -> None:
    clock = Clock()
    pool, (a,) = await known_pool(live_of("a", clock, max_requests=1), clock=clock)
    with await pool.route(REQUEST).next_slot(REQUIREMENTS):
        waiting = [asyncio.create_task(pool.route(REQUEST).next_slot(REQUIREMENTS)) for _ in range(3)]
        await asyncio.sleep(0)
        assert pool.status()[0].waiting == 3
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (pool.status()[0].waiting, a.candidate.running) == (0, 1)
    assert is_idle(a)
    gated = LiveDeployment("b", ScriptedBackend(gate=asyncio.Event()), clock=clock)
    probing = RoutingPool({"m": [gated]}, clock=clock)
    pending = asyncio.create_task(probing.route(REQUEST).next_slot(REQUIREMENTS))
    await asyncio.sleep(0)
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    assert is_idle(gated)
    await probing.aclose()


async def test_waiting_requests_fail_if_all_deployments_fail() -> None:
    clock = Clock()
    rules = RoutingRules(tolerance=BreakerConfig(allowed_fails=0))
    pool, (a, b) = await known_pool(
        live_of("a", clock, max_requests=1), live_of("b", clock, max_requests=1), clock=clock, rules=rules
    )
    first, second = [await pool.route(REQUEST).next_slot(REQUIREMENTS) for _ in range(2)]
    waiting = asyncio.create_task(pool.route(REQUEST).next_slot(REQUIREMENTS))
    await asyncio.sleep(0)
    script_of(a).outcomes = [GONE]
    script_of(b).outcomes = [GONE]
    for slot in (first, second):
        slot.failed(GONE)
        slot.__exit__(None, None, None)
    with pytest.raises(BackendUnavailable):
        await waiting
    assert is_idle(a)
    assert is_idle(b)


@pytest.mark.parametrize("seed", range(12))
async def test_no_slot_is_lost_and_limits_hold_under_random_load(seed: int) -> None:
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
            with await route.next_slot(demand) as slot:
                for live in lives:
                    candidate = live.candidate
                    assert candidate.max_requests is None or candidate.running <= candidate.max_requests
                    assert (
                        candidate.max_tokens is None
                        or candidate.running == 1
                        or candidate.tokens <= candidate.max_tokens
                    )
                await asyncio.sleep(chance.random() * 0.003)
                error = chance.choice(errors)
                if error is not None:
                    slot.failed(error)
                else:
                    slot.succeeded()

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
    assert not [
        outcome for outcome in outcomes if isinstance(outcome, Exception) and not isinstance(outcome, UnisonoError)
    ]
    assert all(is_idle(live) for live in lives)
    assert pool.status()[0].waiting == 0
