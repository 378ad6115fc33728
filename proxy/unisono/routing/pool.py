"""Live deployments by model name: whom to ask first, who rests, and what each of them can do.

A deployment is probed once, by whoever needs it first or in the background at start, and again when it failed; a
failed probe is remembered for a moment only. One that is found unfit is not used, however well it answers. When all
deployments of a model rest they are tried all the same: an answer may come, silence cannot.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import uniform

from unisono.core.generation import Capabilities, Timeouts
from unisono.core.ports import Backend, Deployment
from unisono.core.probe import MEANINGS, PASSING, Check, Finding, Probe, Severity
from unisono.errors import BackendTimeout, BackendUnfit, UnisonoError, UnknownModel
from unisono.routing.health import Circuit, Tolerance, after_failure, counts
from unisono.routing.policy import rendezvous, round_robin
from unisono.routing.slots import SlottedBackend

FAILURE_REMEMBERED_S = 2.0
WATCH_EVERY_S = 5.0
CHECK_EVERY_S = 30.0
"""How long a deployment may be neither used nor probed, in seconds, before it is asked again whether it is there."""
IDLE_AT_MOST_S = 600.0
"""What that grows to, doubling, while nobody uses it: a laptop's model is not to be woken for nothing."""
UNFIT_AT_MOST_S = 30.0
"""What the pause between probes of an unfit deployment grows to: each of them makes it generate."""
PROBES_AT_ONCE = 8

LEVELS = {Severity.FATAL: logging.ERROR, Severity.WARNING: logging.WARNING, Severity.NOTE: logging.INFO}
"""How loudly a failed check is logged."""

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class LiveDeployment:
    """One backend of a model name. `name` is public: it holds no address and no path. `context` caps the window the
    backend claims, in tokens, and stands in where it claims none."""

    name: str
    backend: Backend
    timeouts: Timeouts = field(default_factory=Timeouts)
    weight: int = 1
    context: int | None = None
    clock: Callable[[], float] = time.monotonic
    circuit: Circuit = field(default_factory=Circuit, init=False)
    known: Capabilities | None = field(default=None, init=False)
    """By the last good probe; None before the first, after the deployment was put to rest, and when it is unfit."""
    examined: Probe | None = field(default=None, init=False)
    """The last probe that came to an end, good or bad."""
    failure: UnisonoError | None = field(default=None, init=False)
    """Why the last probe failed; None when it did not."""
    _probed_at: float = field(default=0.0, init=False)
    _used_at: float = field(default=0.0, init=False)
    _unfit: int = field(default=0, init=False)
    """Probes in a row that found it unfit."""
    _idle: int = field(default=0, init=False)
    """Good probes in a row without a use between them."""
    _probing: asyncio.Task[Probe] | None = field(default=None, init=False)

    @property
    def full(self) -> bool:
        """Whether a request would have to wait for a place."""
        return isinstance(self.backend, SlottedBackend) and self.backend.full

    @property
    def unready(self) -> bool:
        """Whether it failed and no probe has found it well since. One that was never asked is given the chance."""
        return self.known is None and (self.examined is not None or self.failure is not None)

    async def capabilities(self) -> Capabilities:
        """The last good probe, probing first when there is none; callers at the same time share one probe. Raises the
        `BackendError` family."""
        if self.known is not None:
            return self.known
        if self._probing is None and self.failure is not None and self.clock() - self._probed_at < self._patience:
            raise self.failure.with_traceback(None)
        return (await self.check()).capabilities

    async def check(self) -> Probe:
        """Probe now, whatever is known. A failure shows in `failure` and leaves `known` as it was: a server that is
        too busy to answer about itself may still answer. One that is found unfit is not used until a later probe finds
        it well. Raises the `BackendError` family, BackendUnfit for a fatal finding."""
        if self._probing is None:
            self._probing = asyncio.create_task(self._probe(), name=f"probe {self.name}")
            self._probing.add_done_callback(self._probed)
        # Shielded: a client that leaves must not end the probe others wait for.
        probe = await asyncio.shield(self._probing)
        if probe.fatal:
            raise _unfit(self.name, probe.fatal)
        return probe

    def stale(self, now: float) -> bool:
        """Whether it is time to probe again."""
        if self.failure is not None:
            return now - self._probed_at >= (self._patience if self._unfit else 0.0)
        pause = min(CHECK_EVERY_S * 2.0**self._idle, IDLE_AT_MOST_S)
        return self.known is None or now - max(self._probed_at, self._used_at) >= pause

    def used(self) -> None:
        """It served a request: proof enough that it is there."""
        self._used_at, self._idle = self.clock(), 0

    @property
    def _patience(self) -> float:
        """How long a failure stands, in seconds."""
        return min(FAILURE_REMEMBERED_S * 2.0 ** max(self._unfit - 1, 0), UNFIT_AT_MOST_S)

    async def _probe(self) -> Probe:
        try:
            # Generous, because probing an engine of our own starts it and loads the model.
            async with asyncio.timeout(self.timeouts.first_token_s):
                found = await self.backend.probe()
        except TimeoutError:
            raise BackendTimeout(f"{self.name} did not say in time what it can do.") from None
        if self.context is None:
            return found
        size = min(self.context, found.capabilities.context or self.context)
        findings = (Finding(Check.CONTEXT, True, f"{size} tokens") if _unsized(f) else f for f in found.findings)
        return replace(found, capabilities=replace(found.capabilities, context=size), findings=tuple(findings))

    def _probed(self, task: asyncio.Task[Probe]) -> None:
        self._probing = None
        if task.cancelled():
            return
        self._probed_at = self.clock()
        error = task.exception()
        about = {"backend": self.name}
        if error is None:
            self._examined(task.result())
        elif isinstance(error, UnisonoError):
            self._unfit = self._idle = 0
            if self.failure is None or self.failure.code != error.code:
                log.warning("backend not ready", extra=about | {"code": error.code, "reason": error.message})
            self.failure = error
        else:
            log.error("probe failed unexpectedly", extra=about, exc_info=error)

    def _examined(self, probe: Probe) -> None:
        before, self.examined = self.examined, probe
        if probe.fatal:
            if any(finding.check not in PASSING for finding in probe.fatal):
                self.known = None
            self.failure, self._unfit, self._idle = _unfit(self.name, probe.fatal), min(self._unfit + 1, 10), 0
        else:
            self._unfit, self._idle = 0, min(self._idle + 1, 10) if self.known is not None else 0
            if self.known is None or self.failure is not None:
                log.info("backend ready", extra={"backend": self.name})
            self.known, self.failure = probe.capabilities, None
        for finding in probe.findings:
            # Once, and again only when something else is found.
            if finding.weight is not None and (before is None or finding not in before.findings):
                log.log(
                    LEVELS[finding.weight],
                    "backend check failed",
                    extra={"backend": self.name, "check": finding.check.value, "severity": finding.weight.value}
                    | {"reason": finding.says, "remedy": finding.advises},
                )

    def forget(self) -> None:
        """Have the next user probe again: what comes back after a failure may be another server."""
        self.known = None

    async def aclose(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            with suppress(asyncio.CancelledError, UnisonoError):
                await self._probing
        await self.backend.aclose()


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """`state` is `ready`, `resting`, `failing`, `unfit` (a fatal finding) or `unknown` (not probed yet); `reason` is an
    error code, or the checks that failed with what to do about them, in words that tell nothing about this backend."""

    model: str
    name: str
    state: str
    reason: str = ""


class RoundRobinPool:
    """Deployments of each model take turns by weight, but turns of one `sticky` value have one order; those with a free
    place come first, those that rest last. A request gets `attempts` of them at most."""

    def __init__(
        self,
        groups: Mapping[str, Sequence[LiveDeployment]],
        tolerance: Tolerance | None = None,
        attempts: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups = {model: tuple(deployments) for model, deployments in groups.items()}
        self._turns = {model: itertools.count() for model in groups}
        self._tolerance = tolerance or Tolerance()
        self._attempts = attempts
        self._clock = clock
        self._live = {id(d): d for deployments in self._groups.values() for d in deployments}
        self._watching: asyncio.Task[None] | None = None
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(PROBES_AT_ONCE)

    def choose(self, model: str, sticky: str = "") -> Sequence[Deployment]:
        """The deployments of `model` in the order to try them; never empty. Raises UnknownModel."""
        group = self._groups.get(model)
        if not group:
            raise UnknownModel(f"The model `{model}` does not exist here.", param="model")
        if len(group) == 1:
            return group
        weights = [deployment.weight for deployment in group]
        if sticky:
            indices = rendezvous(sticky, [deployment.name for deployment in group], weights)
        else:
            indices = round_robin(weights, next(self._turns[model]))
        order = [group[index] for index in indices]
        now = self._clock()
        # Stable: within each rank the turn, or the sticky value, decides.
        order.sort(key=lambda deployment: (deployment.circuit.resting(now), deployment.unready, deployment.full))
        return order[: self._attempts]

    def failed(self, deployment: Deployment, error: UnisonoError) -> None:
        live = self._live[id(deployment)]
        if not counts(error):
            return
        now = self._clock()
        live.circuit = after_failure(live.circuit, now, self._tolerance)
        log.warning("backend failed", extra={"backend": live.name, "code": error.code, "row": live.circuit.failures})
        if live.circuit.resting(now):
            live.forget()

    def succeeded(self, deployment: Deployment) -> None:
        live = self._live[id(deployment)]
        live.used()
        if live.circuit.failures:
            live.circuit = Circuit()

    def start(self) -> None:
        """Begin probing in the background: everything at once, what is not ready every few seconds, and what is ready
        now and then. Needs a running loop."""
        self._watching = asyncio.create_task(self._watch(), name="probe backends")

    async def _watch(self) -> None:
        while True:
            now = self._clock()
            for deployment in self._live.values():
                if id(deployment) not in self._asking and deployment.stale(now) and not deployment.circuit.resting(now):
                    # Each on its own: one that hangs keeps none of the others waiting.
                    self._asking[id(deployment)] = asyncio.create_task(self._ask(deployment))
            # Unevenly, so that many gateways do not ask one server at the same moment.
            await asyncio.sleep(WATCH_EVERY_S * uniform(0.8, 1.2))  # noqa: S311 - nothing secret

    async def _ask(self, deployment: LiveDeployment) -> None:
        try:
            async with self._places:
                await deployment.check()
        except UnisonoError:
            # Kept, and logged, by the deployment.
            return
        finally:
            del self._asking[id(deployment)]

    async def settled(self, timeout_s: float) -> None:
        """Wait until everything has been probed once, but no longer than `timeout_s` seconds."""
        probing = [asyncio.ensure_future(d.capabilities()) for d in self._live.values() if d.known is None]
        if probing:
            _, unfinished = await asyncio.wait(probing, timeout=timeout_s)
            for waiter in unfinished:
                waiter.cancel()
            await asyncio.gather(*probing, return_exceptions=True)

    def status(self) -> list[DeploymentStatus]:
        now = self._clock()
        return [_status(model, d, now) for model, deployments in self._groups.items() for d in deployments]

    def members(self) -> Mapping[str, Sequence[LiveDeployment]]:
        """Every deployment by the model it serves."""
        return self._groups

    def context(self, model: str) -> int | None:
        """The smallest window, in tokens, that any deployment of `model` is known to have; None when none is."""
        return min((size for d in self._groups.get(model, ()) if (size := _window(d))), default=None)

    async def aclose(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.gather(*(deployment.aclose() for deployment in self._live.values()))


def _unsized(finding: Finding) -> bool:
    """Whether all that was wrong is that nobody knew the context, which the configuration does."""
    return finding.check is Check.CONTEXT and finding.weight is Severity.WARNING


def _unfit(name: str, fatal: Sequence[Finding]) -> BackendUnfit:
    return BackendUnfit(f"The backend {name} is not fit for use: {', '.join(finding.check for finding in fatal)}.")


def _window(deployment: LiveDeployment) -> int | None:
    return deployment.known.context if deployment.known is not None else deployment.context


def _status(model: str, deployment: LiveDeployment, now: float) -> DeploymentStatus:
    if isinstance(deployment.failure, BackendUnfit) and deployment.examined is not None:
        found = [(finding.check, MEANINGS[finding.check]) for finding in deployment.examined.fatal]
        reason = " ".join(f"{check}: {meaning.problem} {meaning.remedy}" for check, meaning in found)
        return DeploymentStatus(model, deployment.name, "unfit", reason)
    if deployment.circuit.resting(now):
        return DeploymentStatus(model, deployment.name, "resting", "too many failures in a row")
    if deployment.failure is not None:
        return DeploymentStatus(model, deployment.name, "failing", deployment.failure.code)
    if deployment.known is not None:
        return DeploymentStatus(model, deployment.name, "ready")
    return DeploymentStatus(model, deployment.name, "unknown", "not probed yet")
