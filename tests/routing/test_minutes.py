"""Requests and tokens a minute of deployments: who is chosen, who waits, and who is sent away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.routing.doubles import ASK, DEMAND, Clock, known_pool, live_of
from unisono.config import StandIns
from unisono.core.route_protocol import Slot
from unisono.errors import BackendOverloaded, BackendUnavailable
from unisono.routing import rate_window
from unisono.routing.deployment_config import DeploymentConfig
from unisono.routing.group import RoutingRules
from unisono.routing.pool import CarriedDeployment, RoutingPool
from unisono.routing.queue import QueueConfig
from unisono.routing.rate_window import MINUTE_S

NO_LINE = RoutingRules(bounds=QueueConfig(length=0))
NEXT_S = MINUTE_S + 1


async def used(pool: RoutingPool, tokens: int | None = 150) -> str:
    """Who answers one request; `tokens` are those that it takes, None for nothing asked of it."""
    with await pool.route(ASK).place(DEMAND) as place:
        if tokens is not None:
            place.record_usage(tokens)
            place.succeeded()
        return place.deployment.name


async def test_a_deployment_at_its_requests_is_passed_over_until_its_minute_is_over() -> None:
    clock = Clock()
    lives = live_of("a", clock, requests_per_minute=2), live_of("b", clock, order=1)
    pool, _ = await known_pool(*lives, clock=clock)
    assert [await used(pool) for _ in range(4)] == ["a", "a", "b", "b"]
    clock.now += NEXT_S
    assert [await used(pool) for _ in range(3)] == ["a", "a", "b"]


async def test_tokens_count_as_they_were_used() -> None:
    clock = Clock()
    lives = live_of("a", clock, tokens_per_minute=2000), live_of("b", clock, order=1)
    pool, _ = await known_pool(*lives, clock=clock)
    # Taken for 1,124 each while they run.
    first, second = [await pool.route(ASK).place(DEMAND) for _ in range(2)]
    assert [first.deployment.name, second.deployment.name] == ["a", "b"]
    for place in (first, second):
        place.record_usage(300)
        place.__exit__(None, None, None)
    assert [await used(pool, 500) for _ in range(3)] == ["a", "a", "b"]


async def test_what_was_not_asked_does_not_count() -> None:
    clock = Clock()
    pool, _ = await known_pool(live_of("a", clock, requests_per_minute=1), clock=clock, rules=NO_LINE)
    assert [await used(pool, None) for _ in range(3)] == ["a", "a", "a"]
    await used(pool)
    with pytest.raises(BackendOverloaded):
        await used(pool)


async def test_a_failure_counts_as_a_request() -> None:
    clock = Clock()
    pool, _ = await known_pool(live_of("a", clock, requests_per_minute=1), clock=clock, rules=NO_LINE)
    with await pool.route(ASK).place(DEMAND) as place:
        place.record_usage(100)
        place.failed(BackendUnavailable("gone"))
    with pytest.raises(BackendOverloaded):
        await used(pool)


async def test_whoever_is_sent_away_is_told_when_the_minute_is_over() -> None:
    clock = Clock()
    rated = [live_of(name, clock, requests_per_minute=1) for name in "ab"]
    pool, _ = await known_pool(*rated, clock=clock, rules=NO_LINE)
    await used(pool)
    clock.now += 20
    await used(pool)
    with pytest.raises(BackendOverloaded) as refusal:
        await used(pool)
    assert refusal.value.retry_after_s == pytest.approx(MINUTE_S - 20, abs=1)


@pytest.fixture
def short_minute(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(rate_window, "MINUTE_S", 0.15)
    return 0.15


async def test_whoever_waits_is_served_when_the_minute_is_over(short_minute: float) -> None:
    pool, _ = await known_pool(live_of("a", time.monotonic, requests_per_minute=2), clock=time.monotonic)
    began = time.monotonic()
    async with asyncio.timeout(5):
        assert await asyncio.gather(*(used(pool) for _ in range(5))) == ["a"] * 5
    assert time.monotonic() - began >= 2 * short_minute
    assert pool.status()[0].waiting == 0
    await pool.aclose()


async def test_what_goes_on_at_the_same_deployment_waits_too(short_minute: float) -> None:
    pool, _ = await known_pool(live_of("a", time.monotonic, requests_per_minute=1), clock=time.monotonic)
    route, began = pool.route(ASK), time.monotonic()
    for resumes in (False, True):
        with await route.place(replace(DEMAND, resumes=resumes)) as place:
            place.record_usage(100)
            place.succeeded()
    assert time.monotonic() - began >= short_minute
    await pool.aclose()


async def test_a_model_that_stands_in_does_so_at_once() -> None:
    clock = Clock()
    lives = {"m": [live_of("a", clock, requests_per_minute=1)], "n": [live_of("b", clock)]}
    pool = RoutingPool(lives, stand_ins={"m": StandIns(("n",))}, clock=clock)
    await pool.settled(5)
    async with asyncio.timeout(5):
        assert [await used(pool) for _ in range(3)] == ["a", "b", "b"]


CHANGES: dict[str, tuple[DeploymentConfig, int]] = {
    "as before": (DeploymentConfig("a", requests_per_minute=2), 1),
    "more of them": (DeploymentConfig("a", requests_per_minute=4), 3),
    "fewer than there were": (DeploymentConfig("a", requests_per_minute=1), 0),
    "tokens": (DeploymentConfig("a", tokens_per_minute=1300), 1),
    "none": (DeploymentConfig("a"), 9),
}


@pytest.mark.parametrize(("terms", "more"), CHANGES.values(), ids=CHANGES)
async def test_a_deployment_that_is_kept_keeps_its_minute(terms: DeploymentConfig, more: int) -> None:
    clock = Clock()
    old, (live,) = await known_pool(live_of("a", clock, requests_per_minute=2), clock=clock)
    old.start()
    await used(old)
    new = RoutingPool(
        {"m": [live]}, NO_LINE, carried=[CarriedDeployment(live, terms, old)], prefixes=old.prefixes, clock=clock
    )
    new.start()
    await old.aclose()
    places: list[Slot] = []
    for _ in range(9):
        try:
            places.append(await new.route(ASK).place(DEMAND))
        except BackendOverloaded:
            break
    assert len(places) == more
    clock.now += NEXT_S
    for place in places:
        place.record_usage(1)
        place.__exit__(None, None, None)
    clock.now += NEXT_S
    assert await used(new) == "a"
    await new.aclose()


async def test_one_that_is_rated_and_one_that_is_full_are_both_waited_for(short_minute: float) -> None:
    clock: Callable[[], float] = time.monotonic
    lives = live_of("a", clock, requests_per_minute=1), live_of("b", clock, max_requests=1)
    pool, _ = await known_pool(*lives, clock=clock)
    held = [await pool.route(ASK).place(DEMAND) for _ in range(2)]
    waiting = asyncio.create_task(used(pool))
    await asyncio.sleep(0)
    free = next(place for place in held if place.deployment.name == "b")
    free.__exit__(None, None, None)
    async with asyncio.timeout(1):
        assert await waiting == "b"
    await pool.aclose()
