"""Hedged answers: the order of their chunks, and the rate limits of both deployments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.routing.doubles import IDS, REQUEST, REQUIREMENTS, Clock, ScriptedBackend, known_pool
from unisono.core.generation import Chunk, CompletionJob, FinishReason, Prompt
from unisono.routing.deployment import LiveDeployment
from unisono.routing.deployment_config import DeploymentConfig
from unisono.routing.group import RoutingRules
from unisono.routing.hedge import HedgeActions, HedgeRules, hedged

CHUNKS = [Chunk(tokens=[token]) for token in range(50)] + [Chunk(finish=FinishReason.STOP)]


class OfferingBackend(ScriptedBackend):
    """Backend that offers each chunk to the job before it yields it."""

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        for chunk in CHUNKS:
            if job.on_chunk is None or not job.on_chunk(chunk):
                yield chunk


def switch(*_: object) -> None:
    pytest.fail("there is no second deployment")


async def test_chunks_that_are_read_ahead_stay_in_order() -> None:
    received: list[Chunk] = []

    def on_chunk(chunk: Chunk) -> bool:
        # The engine takes no chunk before the first one, which it reads itself.
        if received:
            received.append(chunk)
        return bool(received)

    live = LiveDeployment("a", OfferingBackend(), clock=Clock())
    actions = HedgeActions(lambda: None, switch, switch)
    job = CompletionJob(Prompt(tokens=(1,)), 100, on_chunk=on_chunk)
    async for chunk in hedged(live, job, 1.0, actions):
        received.append(chunk)
    assert received == CHUNKS


class SlowBackend(ScriptedBackend):
    """Backend whose first token arrives after `delay_s` seconds."""

    def __init__(self, delay_s: float) -> None:
        super().__init__([IDS])
        self.delay_s = delay_s

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        await asyncio.sleep(self.delay_s)
        yield Chunk(tokens=[1], finish=FinishReason.STOP)


DELAYS = {"the second one answers": (60.0, 0.0, "b"), "the first one answers": (0.2, 60.0, "a")}


@pytest.mark.parametrize(("first_s", "second_s", "winner"), DELAYS.values(), ids=DELAYS)
async def test_both_requests_count_against_the_rate_limits(first_s: float, second_s: float, winner: str) -> None:
    clock = Clock()
    lives = [
        LiveDeployment(DeploymentConfig(name, order=order, requests_per_minute=5), SlowBackend(delay_s), clock=clock)
        for order, (name, delay_s) in enumerate([("a", first_s), ("b", second_s)])
    ]
    rules = RoutingRules(hedge=HedgeRules(0.05))
    pool, _ = await known_pool(*lives, clock=clock, rules=rules)
    with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
        job = CompletionJob(Prompt(tokens=(1,) * 100), 10)
        assert len([chunk async for chunk in slot.deployment.backend.complete(job)]) == 1
        assert slot.deployment.name == winner
        slot.record_usage(101)
    rates = {live.name: live.candidate.rate for live in lives}
    counts = {name: (rate.requests, rate.tokens) for name, rate in rates.items() if rate is not None}
    assert counts == {name: (1, 101 if name == winner else 100) for name in "ab"}
    assert not any(live.candidate.running for live in lives)
