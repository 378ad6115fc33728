"""What the tests of routing have in common: backends that do what their test says, and a clock that stands still."""

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
class Script:
    """Counts what it is asked. The last outcome of a probe stands for all that follow."""

    outcomes: list[Capabilities | Probe | UnisonoError] = field(default_factory=lambda: [IDS])
    gate: asyncio.Event | None = None
    loads: list[Load | UnisonoError | None] = field(default_factory=list)
    probes: int = 0
    asked_for_load: int = 0
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
        self.asked_for_load += 1
        said = self.loads[min(self.asked_for_load, len(self.loads)) - 1] if self.loads else None
        if isinstance(said, UnisonoError):
            raise said
        return said

    async def aclose(self) -> None:
        self.closed = True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def script_of(live: LiveDeployment) -> Script:
    assert isinstance(live.backend, Script)
    return live.backend


def live_of(name: str, clock: Callable[[], float], capabilities: Capabilities = IDS, **terms: int) -> LiveDeployment:
    return LiveDeployment(DeploymentConfig(name, **terms), Script([capabilities]), clock=clock)  # type: ignore[arg-type]


async def known_pool(
    *names: str | LiveDeployment, clock: Callable[[], float], rules: RoutingRules | None = None
) -> tuple[RoutingPool, list[LiveDeployment]]:
    """A pool of one model, `m`, whose deployments were probed."""
    lives = [live_of(one, clock) if isinstance(one, str) else one for one in names]
    pool = RoutingPool({"m": lives}, rules, clock=clock)
    await pool.settled(5)
    return pool, lives


ASK = RouteRequest("m")
DEMAND = RouteRequirements(prompt_tokens=100)
