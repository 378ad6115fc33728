"""Failover of requests that require an ability: only to deployments that have the ability."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.routing.doubles import IDS, REQUEST, REQUIREMENTS, Clock, ScriptedBackend, live_of
from unisono.core.fallback_models import FallbackModels
from unisono.core.route_protocol import FailoverRoute
from unisono.errors import BackendUnavailable
from unisono.routing.deployment import LiveDeployment
from unisono.routing.pool import RoutingPool

GONE = BackendUnavailable("gone")
ABLE = replace(IDS, logprobs=True, constrain=frozenset({"json"}))
UNABLE = replace(IDS, logprobs=False, constrain=frozenset({"json"}))
DEMAND = replace(REQUIREMENTS, preferred_abilities=frozenset({"logprobs"}))
RESUMED = replace(DEMAND, resumes=True)
FALLBACKS = {"m": FallbackModels(fallbacks=("n",))}


async def pool_of(clock: Clock, m: dict[str, bool], n: dict[str, bool]) -> RoutingPool:
    """Return a pool of the model `m` and its fallback `n`.

    `m` and `n` map the names of deployments to True if the deployment has the ability.
    """

    def members(group: dict[str, bool]) -> list[LiveDeployment]:
        return [live_of(name, clock, ABLE if able else UNABLE) for name, able in group.items()]

    pool = RoutingPool({"m": members(m), "n": members(n)}, fallback_models=FALLBACKS if n else {}, clock=clock)
    await pool.wait_for_probes(5)
    return pool


async def fail(route: FailoverRoute) -> str:
    with await route.next_slot(DEMAND) as slot:
        slot.failed(GONE)
        return slot.deployment.name


POOLS: dict[str, tuple[dict[str, bool], dict[str, bool]]] = {
    "same model": ({"able": True, "unable": False}, {}),
    "fallback model": ({"able": True}, {"unable": False}),
    "requested model": ({"unable": False}, {"able": True}),
}


@pytest.mark.parametrize("name", POOLS)
async def test_only_deployments_with_the_ability_are_tried(name: str) -> None:
    pool = await pool_of(Clock(), *POOLS[name])
    route = pool.route(REQUEST)
    with await route.next_slot(DEMAND) as slot:
        assert slot.deployment.name == "able"
        prospects = route.prospects(GONE, resumes=False, held=True)
        assert not prospects.available
        assert prospects.later_s is not None
        slot.failed(GONE)
    with pytest.raises(BackendUnavailable):
        await route.next_slot(DEMAND)
    route.retry_failed()
    with await route.next_slot(RESUMED) as slot:
        assert slot.deployment.name == "able"


async def test_a_model_for_longer_prompts_does_not_answer_a_short_prompt() -> None:
    clock = Clock()
    groups = {"m": [live_of("unable", clock, UNABLE)], "large": [live_of("able", clock, ABLE)]}
    pool = RoutingPool(groups, fallback_models={"m": FallbackModels(larger=("large",))}, clock=clock)
    await pool.wait_for_probes(5)
    with await pool.route(REQUEST).next_slot(DEMAND) as slot:
        assert slot.deployment.name == "unable"
    too_long = replace(DEMAND, prompt_tokens=10_000)
    with await pool.route(REQUEST).next_slot(too_long) as slot:
        assert slot.deployment.name == "able"


async def test_another_deployment_with_the_ability_is_preferred_to_a_retry() -> None:
    pool = await pool_of(Clock(), {"able": True, "unable": False, "second": True}, {})
    route = pool.route(REQUEST)
    assert {await fail(route), await fail(route)} == {"able", "second"}


async def test_without_the_ability_anywhere_any_deployment_is_given() -> None:
    pool = await pool_of(Clock(), {"a": False, "b": False}, {})
    with await pool.route(REQUEST).next_slot(DEMAND) as slot:
        assert not slot.capabilities.logprobs


@pytest.mark.parametrize("is_probed", [False, True], ids=["no probe yet", "probed"])
async def test_a_deployment_that_never_answered_may_have_the_ability(is_probed: bool) -> None:
    clock = Clock()
    down = live_of("down", clock)
    backend = down.endpoint
    assert isinstance(backend, ScriptedBackend)
    backend.outcomes = [GONE]
    pool = RoutingPool({"m": [down, live_of("unable", clock, UNABLE)]}, clock=clock)
    if is_probed:
        await pool.wait_for_probes(0.1)
    with pytest.raises(BackendUnavailable):
        await pool.route(REQUEST).next_slot(DEMAND)
    with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        assert slot.deployment.name == "unable"
