"""Test doubles of routing: scripted backends, a manual clock, pools of probed deployments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from unisono.core.generation import Capabilities, Chunk, CompletionJob, FinishReason, Load, OutputForm
from unisono.core.probe import Probe
from unisono.core.route_protocol import RouteRequest, RouteRequirements
from unisono.errors import UnisonoError
from unisono.routing.deployment import LiveDeployment
from unisono.routing.deployment_config import DeploymentConfig
from unisono.routing.group import RoutingRules
from unisono.routing.pool import RoutingPool

IDS = Capabilities(prompt=OutputForm.IDS, output=OutputForm.IDS, stop_visible=True, context=8192)


@dataclass
class ScriptedBackend:
    """Backend that counts probes and load requests; the last outcome of a list is repeated."""

    outcomes: list[Capabilities | Probe | UnisonoError] = field(default_factory=lambda: [IDS])
    gate: asyncio.Event | None = None
    loads: list[Load | UnisonoError | None] = field(default_factory=list)
    probes: int = 0
    load_requests: int = 0
    closed: bool = False

    async def probe(self) -> Probe:
        outcome = self.outcomes[min(self.probes, len(self.outcomes) - 1)]
        self.probes += 1
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(outcome, UnisonoError):
            raise outcome
        return outcome if isinstance(outcome, Probe) else Probe(outcome)

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        yield Chunk(finish=FinishReason.STOP)

    async def load(self) -> Load | None:
        self.load_requests += 1
        outcome = self.loads[min(self.load_requests, len(self.loads)) - 1] if self.loads else None
        if isinstance(outcome, UnisonoError):
            raise outcome
        return outcome

    async def aclose(self) -> None:
        self.closed = True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def script_of(live: LiveDeployment) -> ScriptedBackend:
    assert isinstance(live.backend, ScriptedBackend)
    return live.backend


def live_of(name: str, clock: Callable[[], float], capabilities: Capabilities = IDS, **terms: object) -> LiveDeployment:
    return LiveDeployment(DeploymentConfig(name, **terms), ScriptedBackend([capabilities]), clock=clock)  # type: ignore[arg-type]


async def known_pool(
    *names: str | LiveDeployment, clock: Callable[[], float], rules: RoutingRules | None = None
) -> tuple[RoutingPool, list[LiveDeployment]]:
    """Return a pool of one model, `m`, whose deployments are probed."""
    lives = [live_of(item, clock) if isinstance(item, str) else item for item in names]
    pool = RoutingPool({"m": lives}, rules, clock=clock)
    await pool.wait_for_probes(5)
    return pool, lives


REQUEST = RouteRequest("m")
REQUIREMENTS = RouteRequirements(prompt_tokens=100)
