"""Rate limits of deployments per minute: selection, waiting and rejection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.routing.doubles import REQUEST, REQUIREMENTS, Clock, known_pool, live_of
from unisono.core.fallback_models import FallbackModels
from unisono.core.route_protocol import Slot
from unisono.errors import BackendOverloaded, BackendUnavailable
from unisono.routing import deployment_rate_limits
from unisono.routing.deployment_config import DeploymentConfig
from unisono.routing.deployment_rate_limits import MINUTE_S
from unisono.routing.group import RoutingRules
from unisono.routing.pool import CarriedDeployment, RoutingPool
from unisono.routing.queue import QueueConfig

NO_QUEUE = RoutingRules(bounds=QueueConfig(length=0))
NEXT_S = MINUTE_S + 1


async def send_request(pool: RoutingPool, tokens: int | None = 150) -> str:
    """Take a slot and return its deployment; `tokens` are used, or None if nothing is sent."""
    with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        if tokens is not None:
            slot.record_usage(tokens)
            slot.succeeded()
        return slot.deployment.name


async def test_a_deployment_at_its_request_rate_is_skipped_for_a_minute() -> None:
    clock = Clock()
    lives = live_of("a", clock, requests_per_minute=2), live_of("b", clock, order=1)
    pool, _ = await known_pool(*lives, clock=clock)
    assert [await send_request(pool) for _ in range(4)] == ["a", "a", "b", "b"]
    clock.now += NEXT_S
    assert [await send_request(pool) for _ in range(3)] == ["a", "a", "b"]


async def test_the_token_rate_counts_used_tokens() -> None:
    clock = Clock()
    lives = live_of("a", clock, tokens_per_minute=2000), live_of("b", clock, order=1)
    pool, _ = await known_pool(*lives, clock=clock)
    # Each counts as 1,124 tokens while it runs.
    first, second = [await pool.route(REQUEST).next_slot(REQUIREMENTS) for _ in range(2)]
    assert [first.deployment.name, second.deployment.name] == ["a", "b"]
    for slot in (first, second):
        slot.record_usage(300)
        slot.__exit__(None, None, None)
    assert [await send_request(pool, 500) for _ in range(3)] == ["a", "a", "b"]


async def test_an_unsent_request_does_not_count() -> None:
    clock = Clock()
    pool, _ = await known_pool(live_of("a", clock, requests_per_minute=1), clock=clock, rules=NO_QUEUE)
    assert [await send_request(pool, None) for _ in range(3)] == ["a", "a", "a"]
    await send_request(pool)
    with pytest.raises(BackendOverloaded):
        await send_request(pool)


async def test_a_failure_counts_as_a_request() -> None:
    clock = Clock()
    pool, _ = await known_pool(live_of("a", clock, requests_per_minute=1), clock=clock, rules=NO_QUEUE)
    with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        slot.record_usage(100)
        slot.failed(BackendUnavailable("gone"))
    with pytest.raises(BackendOverloaded):
        await send_request(pool)


async def test_a_rejected_request_has_the_end_of_the_minute_as_retry_after() -> None:
    clock = Clock()
    rated = [live_of(name, clock, requests_per_minute=1) for name in "ab"]
    pool, _ = await known_pool(*rated, clock=clock, rules=NO_QUEUE)
    await send_request(pool)
    clock.now += 20
    await send_request(pool)
    with pytest.raises(BackendOverloaded) as refusal:
        await send_request(pool)
    assert refusal.value.retry_after_s == pytest.approx(MINUTE_S - 20, abs=1)


UNUSABLE = {"drained": DeploymentConfig("b", is_drained=True), "shadow": DeploymentConfig("b", shadow_of="a")}


@pytest.mark.parametrize("terms", UNUSABLE.values(), ids=UNUSABLE)
async def test_retry_after_ignores_deployments_that_serve_no_requests(terms: DeploymentConfig) -> None:
    clock = Clock()
    unusable = live_of("b", clock)
    pool, _ = await known_pool(live_of("a", clock, requests_per_minute=1), unusable, clock=clock, rules=NO_QUEUE)
    unusable.become(terms)
    await send_request(pool)
    with pytest.raises(BackendOverloaded) as refusal:
        await send_request(pool)
    assert refusal.value.retry_after_s == pytest.approx(MINUTE_S, abs=1)


@pytest.fixture
def short_minute(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(deployment_rate_limits, "MINUTE_S", 0.15)
    return 0.15


async def test_waiting_requests_are_served_in_the_next_minute(short_minute: float) -> None:
    pool, _ = await known_pool(live_of("a", time.monotonic, requests_per_minute=2), clock=time.monotonic)
    began = time.monotonic()
    async with asyncio.timeout(5):
        assert await asyncio.gather(*(send_request(pool) for _ in range(5))) == ["a"] * 5
    assert time.monotonic() - began >= 2 * short_minute
    assert pool.status()[0].waiting == 0
    await pool.aclose()


async def test_a_resumed_answer_on_the_same_deployment_waits_too(short_minute: float) -> None:
    pool, _ = await known_pool(live_of("a", time.monotonic, requests_per_minute=1), clock=time.monotonic)
    route, began = pool.route(REQUEST), time.monotonic()
    for resumes in (False, True):
        with await route.next_slot(replace(REQUIREMENTS, resumes=resumes)) as slot:
            slot.record_usage(100)
            slot.succeeded()
    assert time.monotonic() - began >= short_minute
    await pool.aclose()


async def test_a_fallback_model_is_used_without_waiting() -> None:
    clock = Clock()
    lives = {"m": [live_of("a", clock, requests_per_minute=1)], "n": [live_of("b", clock)]}
    pool = RoutingPool(lives, fallback_models={"m": FallbackModels(("n",))}, clock=clock)
    await pool.wait_for_probes(5)
    async with asyncio.timeout(5):
        assert [await send_request(pool) for _ in range(3)] == ["a", "b", "b"]


CHANGES: dict[str, tuple[DeploymentConfig, int]] = {
    "unchanged limit": (DeploymentConfig("a", requests_per_minute=2), 1),
    "higher limit": (DeploymentConfig("a", requests_per_minute=4), 3),
    "lower limit": (DeploymentConfig("a", requests_per_minute=1), 0),
    "token limit instead": (DeploymentConfig("a", tokens_per_minute=1300), 1),
    "no limit": (DeploymentConfig("a"), 9),
}


@pytest.mark.parametrize(("terms", "more"), CHANGES.values(), ids=CHANGES)
async def test_a_carried_deployment_keeps_its_rate_window(terms: DeploymentConfig, more: int) -> None:
    clock = Clock()
    old, (live,) = await known_pool(live_of("a", clock, requests_per_minute=2), clock=clock)
    old.start()
    await send_request(old)
    new = RoutingPool(
        {"m": [live]},
        NO_QUEUE,
        carried=[CarriedDeployment(live, terms)],
        replaced=old,
        prefixes=old.prefixes,
        clock=clock,
    )
    new.start()
    await old.aclose()
    slots: list[Slot] = []
    for _ in range(9):
        try:
            slots.append(await new.route(REQUEST).next_slot(REQUIREMENTS))
        except BackendOverloaded:
            break
    assert len(slots) == more
    clock.now += NEXT_S
    for slot in slots:
        slot.record_usage(1)
        slot.__exit__(None, None, None)
    clock.now += NEXT_S
    assert await send_request(new) == "a"
    await new.aclose()


async def test_a_request_waits_for_rate_limited_and_full_deployments(short_minute: float) -> None:
    clock: Callable[[], float] = time.monotonic
    lives = live_of("a", clock, requests_per_minute=1), live_of("b", clock, max_requests=1)
    pool, _ = await known_pool(*lives, clock=clock)
    held = [await pool.route(REQUEST).next_slot(REQUIREMENTS) for _ in range(2)]
    waiting = asyncio.create_task(send_request(pool))
    await asyncio.sleep(0)
    free = next(slot for slot in held if slot.deployment.name == "b")
    free.__exit__(None, None, None)
    async with asyncio.timeout(1):
        assert await waiting == "b"
    await pool.aclose()
