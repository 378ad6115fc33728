"""One live backend of a model: capabilities, health and load.

The backend is probed at startup or on first use, and again after failures. A deployment that seems to be down is probed
at once, so that the next request avoids it, and then often until it is back. The error of a failed probe is reused for
a few seconds only. An unfit deployment is not used, even if it answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from math import inf
from random import uniform
from typing import cast

from unisono.core.deployments import FidelityState, FidelityStatus
from unisono.core.error_texts import seconds
from unisono.core.frozen import dataclass
from unisono.core.generation import Capabilities, Load
from unisono.core.ports import Backend, Endpoint, PassthroughBackend
from unisono.core.probe import TEMPORARY_FAILURES, Probe
from unisono.core.tasks import cancel_and_wait
from unisono.errors import BackendTimeout, BackendUnfit, UnisonoError
from unisono.routing.attempt_timeouts import AttemptTimes, FirstTokenWaits, GenerationActivity
from unisono.routing.blame import Suspicion, is_independent
from unisono.routing.circuit_breaker import (
    BreakerConfig,
    BreakerFailure,
    CircuitPhase,
    Circuits,
    after_failure,
    after_success,
    kind_of,
    phase_of,
    rests_until,
    suspected,
)
from unisono.routing.deployment_choice import BIAS, LOGPROBS, PROMPT_LOGPROBS, Candidate, Rank, Share
from unisono.routing.deployment_config import DeploymentConfig, log_findings, unfit, with_context
from unisono.routing.deployment_rate_limits import rate_of
from unisono.routing.probe_schedule import DOUBTED_EVERY_S, FAILING_EVERY_S, ProbeSchedule
from unisono.routing.quality import QualityRecord
from unisono.routing.tie_break import number_of
from unisono.routing.waking import Waking

LOG_DELAY_S = 0.05  # seconds from a failure to its log line
DOUBTFUL = frozenset({BreakerFailure.UNREACHABLE, BreakerFailure.PROTOCOL})  # failures of a possibly dead deployment

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlotReservation:
    """Reserved slot; `at` is the time of the reservation in monotonic seconds."""

    live: LiveDeployment
    share: Share
    at: float = 0.0


class LiveDeployment:
    """Deployment with health state. `endpoint` speaks Harmony, or OpenAI's own API if `passes`.

    `context` is a number of tokens that caps the context window of the backend, or is used if none is reported.
    Deployments with equal `identity` have the same backend in different configurations. `listeners` are called when a
    slot becomes free or the deployment recovers. With `awaits_probe`, the deployment is not used until a probe has
    passed."""

    def __init__(
        self,
        terms: DeploymentConfig | str,
        endpoint: Endpoint,
        *,
        passes: bool = False,
        context: int | None = None,
        identity: object = None,
        awaits_probe: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.terms = DeploymentConfig(terms) if isinstance(terms, str) else terms
        self.name, self.timeouts = self.terms.name, self.terms.timeouts
        self.endpoint = endpoint
        self.passes, self.context, self.identity = passes, context, identity
        self.awaits_probe = awaits_probe
        self.users = 0  # number of pools whose requests may use this deployment; the last pool closes it
        self.clock = clock
        self.tolerance = BreakerConfig()
        self.quality = QualityRecord()
        self.is_weighted_by_quality = False
        self.fidelity: FidelityStatus | None = None
        self.waking = Waking()
        self.hedges = self.hedges_won = 0  # second requests sent to it, and those that answered first
        self.comparing = 0  # requests of continuous fidelity, which the server reports like those of other clients
        self.listeners: list[Callable[[], None]] = []
        self.on_doubt: Callable[[], None] | None = None  # called when a probe is needed now
        self.candidate = Candidate(self.terms.name, bit=0, context=context, rank=Rank.UNKNOWN)
        self.circuits: Circuits = {}
        self.times = AttemptTimes()
        self.waits = FirstTokenWaits()
        self.generation = GenerationActivity()
        self.known: Capabilities | None = None  # from the last passed probe; None after a circuit opened, and if unfit
        self.examined: Probe | None = None  # the last finished probe, good or bad
        self.failure: UnisonoError | None = None  # error of the last probe; None if it passed, or after a success
        self.last_request_at = 0.0  # time of the last request
        self.healthy_since = self.failing_since = self.drained_since = clock()  # start of each state; not for circuits
        self._suspicion = Suspicion()
        self.probes = ProbeSchedule()
        self._probing: asyncio.Task[Probe] | None = None
        self.become(self.terms)

    @property
    def backend(self) -> Backend:
        """Harmony backend; must not be used if the deployment is pass-through."""
        return cast(Backend, self.endpoint)

    @property
    def passing(self) -> PassthroughBackend:
        """Pass-through backend; must not be used for a Harmony deployment."""
        return cast(PassthroughBackend, self.endpoint)

    def become(self, terms: DeploymentConfig) -> None:
        """Apply the reloaded configuration `terms`; requests in progress continue."""
        if terms.is_drained and not self.terms.is_drained:
            self.drained_since = self.clock()
        self.terms, self.name, self.timeouts = terms, terms.name, terms.timeouts
        one = self.candidate
        one.name, one.seed, one.order = terms.name, number_of(terms.name), terms.order
        self.apply_weight()
        rate = rate_of(terms.requests_per_minute, terms.tokens_per_minute, one.rate)
        one.bound(terms.max_requests, terms.max_tokens, rate)
        self._changed()

    def apply_weight(self) -> None:
        """Set the candidate's weight, multiplied by the quality level if routing uses the quality."""
        self.candidate.weight = self.terms.weight * (self.quality.level if self.is_weighted_by_quality else 1)

    def phase(self, now: float) -> CircuitPhase:
        return phase_of(self.circuits, now)

    def refresh(self, now: float) -> None:
        """Update the rank and rate of the candidate, which also change when time passes."""
        self.candidate.rank = self._rank(now)
        if self.candidate.rate is not None:
            self.candidate.rate.move(now)

    @property
    def is_idle(self) -> bool:
        """True if no request of any client is known to run on the deployment."""
        return not self.candidate.running and not self.candidate.foreign_requests

    def set_fidelity(self, status: FidelityStatus | None) -> None:
        """Set the fidelity. A quarantined deployment is not used while another deployment works."""
        self.fidelity = status
        self._changed()

    def _rank(self, now: float) -> Rank:
        rank = self._health_rank(now)
        is_quarantined = self.fidelity is not None and self.fidelity.state is FidelityState.QUARANTINED
        return max(rank, Rank.RESTING) if is_quarantined or self.terms.is_removed else rank

    def _health_rank(self, now: float) -> Rank:
        if self.terms.is_withdrawn or self.awaits_probe:
            return Rank.UNFIT
        if self.known is None and self.failure is not None:
            return Rank.UNFIT if isinstance(self.failure, BackendUnfit) else Rank.UNREADY
        if self.circuits:
            phase = self.phase(now)
            if phase is CircuitPhase.OPEN:
                return Rank.RESTING
            if phase is CircuitPhase.HALF_OPEN:
                return Rank.HALF_OPEN
        if self.failure is not None:
            return Rank.HALF_OPEN
        return Rank.HEALTHY if self.known is not None else Rank.UNKNOWN

    def hold(self, share: Share) -> SlotReservation:
        """Return the reservation for `share`, and record the time of the request."""
        self.last_request_at = self.clock()
        return SlotReservation(self, share, self.last_request_at)

    def give_back(self, hold: SlotReservation) -> None:
        now = self.clock()
        hold.share.give_back(now)
        # Without circuits and rate limits, time alone does not change the candidate.
        if self.circuits or self.candidate.rate is not None:
            self.refresh(now)
        for listener in self.listeners:
            listener()

    def set_server_load(self, load: Load | None, running_before: int = 0) -> None:
        """Set the load that the server reports.

        `running_before` is the number of the gateway's own requests on the server when it was polled.
        """
        running, waiting = (0, 0) if load is None else (load.running, load.waiting)
        own = max(running_before, self.candidate.running) + self.comparing
        self.candidate.set_server_load(running, waiting, own)

    def failed(self, error: UnisonoError, identity: str = "") -> None:
        """Record that a generation ended in `error`.

        `identity` identifies the client; empty if it is unknown. Failures of a single identity open a circuit only if a
        probe fails too."""
        kind = kind_of(error)
        if kind is None:
            return
        self._forget_sleeping(error)
        now = self.clock()
        before = self.phase(now)
        if is_independent(error) or (self.passes and before is CircuitPhase.HALF_OPEN):
            identity = ""
        jitter = uniform(0.9, 1.1)  # noqa: S311
        self.circuits = after_failure(self.circuits, error, now, self.tolerance, jitter, identity=identity)
        about = {"backend": self.name, "code": error.code, "kind": kind.value, "row": self.circuits[kind].failures}
        # A client waits for the next attempt, and its first token can arrive within a millisecond. Writing this line
        # takes longer than preparing that attempt, so it is written later.
        asyncio.get_running_loop().call_later(LOG_DELAY_S, lambda: log.warning("backend failed", extra=about))
        self._phased(before, kind, now)
        is_suspect = self._suspicion.failed(self.circuits, self.tolerance, now)
        if is_suspect and self.passes:
            self._judge(now, fails=not self._suspicion.has_served(self.circuits, self.tolerance))
        self.probes.is_doubted = self.probes.is_doubted or kind in DOUBTFUL
        if (kind in DOUBTFUL or is_suspect) and self.on_doubt is not None:
            self.on_doubt()

    def _forget_sleeping(self, error: UnisonoError) -> None:
        """If the deployment can be woken and is unreachable, make the next request wake it."""
        if self.terms.wake is not None and kind_of(error) is BreakerFailure.UNREACHABLE:
            self.known = None

    def _judge(self, now: float, *, fails: bool) -> None:
        """Settle a suspicion. If `fails` is True, the deployment is the cause, otherwise the client."""
        before, suspects, jitter = self.phase(now), suspected(self.circuits, self.tolerance), uniform(0.9, 1.1)  # noqa: S311
        self.circuits = self._suspicion.judged(self.circuits, self.tolerance, now, fails=fails, jitter=jitter)
        self.refresh(now)
        for kind, caller in suspects.items():
            if fails:
                self._phased(before, kind, now)
            else:
                log.warning("failures limited to one caller", extra={"backend": self.name, "caller": caller})

    def succeeded(self, started_at: float = inf) -> None:
        """Record that a request begun at `started_at` was served, so the deployment is up."""
        now = self.clock()
        self.probes.record_use(now)
        self._suspicion.served(started_at, now)
        if self.circuits:
            self._forgiven(now, after_success(self.circuits, started_at))
        if self.failure is not None and self.known is not None:
            log.info("backend ready", extra={"backend": self.name})
            self.failure, self.probes.unreachable_since, self.healthy_since = None, None, now
            self._changed()

    def _forgiven(self, now: float, circuits: Circuits) -> None:
        before = self.phase(now)
        self.circuits = circuits
        if before is not CircuitPhase.CLOSED and self.phase(now) is CircuitPhase.CLOSED:
            self.healthy_since = now
            log.info("backend available again", extra={"backend": self.name})
        self._changed()

    def _phased(self, before: CircuitPhase, kind: BreakerFailure, now: float) -> None:
        if self.phase(now) is CircuitPhase.OPEN and before is not CircuitPhase.OPEN:
            rest_s = round(rests_until(self.circuits) - now, 1)
            log.warning("backend circuit opened", extra={"backend": self.name, "kind": kind.value, "rest_s": rest_s})
            if kind is not BreakerFailure.OVERLOADED:
                # The next request probes again, because a different server may come back after the failure.
                self.known = None
        self._changed()

    def _changed(self) -> None:
        self.refresh(self.clock())
        for listener in self.listeners:
            listener()

    async def capabilities(self) -> Capabilities:
        """Return the result of the last successful probe; probe first if there is none.

        Concurrent callers share one probe. Raises a BackendError if the probe fails."""
        if self.known is not None:
            return self.known
        if self._probing is None and self.failure is not None and self.probes.has_recent_failure(self.clock()):
            raise self.failure.with_traceback(None)
        return (await self.check()).capabilities

    async def check(self) -> Probe:
        """Probe now, regardless of earlier probes.

        A failure is stored in `failure` and leaves `known` unchanged: a server too busy for a probe may still
        serve. An unfit deployment stays unused until a later probe passes. Raises a BackendError if the probe fails,
        and BackendUnfit if it has a fatal finding."""
        if self._probing is None:
            now = self.clock()
            self.probes.record_start(now)
            self.waits.postpone_probes(now + FAILING_EVERY_S)
            self._probing = asyncio.create_task(self._probe(), name=f"probe {self.name}")
            self._probing.add_done_callback(self._probed)
        # Shielded: a client that disconnects must not end the probe that others wait for.
        probe = await asyncio.shield(self._probing)
        if probe.fatal:
            raise unfit(self.name, probe.fatal)
        return probe

    def stale(self, now: float) -> bool:
        """Return whether a probe is due."""
        if self.probes.is_doubted or self.waits.next_probe_at <= now:
            return now - self.probes.ended_at >= DOUBTED_EVERY_S
        if self._suspicion.since is not None:
            return self._suspicion.is_due(now, self.probes.ended_at)
        return self.probes.is_due(
            now, self.phase(now), is_failing=self.failure is not None, is_known=self.known is not None
        )

    def urgent(self, now: float) -> bool:
        """Return whether to check for due probes more often: the deployment may be down or back."""
        return self.probes.is_doubted or self._suspicion.since is not None or self.probes.is_expected_back(now)

    async def _probe(self) -> Probe:
        try:
            # The limit is generous, because the probe of an engine inside the gateway starts it and loads the model.
            async with asyncio.timeout(self.timeouts.first_token_s):
                found = await self.endpoint.probe()
        except TimeoutError:
            limit = seconds(self.timeouts.first_token_s)
            remedy = "check the backend, or raise `first_token_timeout_s` of the model"
            raise BackendTimeout(f"The probe of the backend {self.name} took more than {limit}; {remedy}.") from None
        return with_context(found, self.context)

    def _probed(self, task: asyncio.Task[Probe]) -> None:
        self._probing = None
        if task.cancelled():
            return
        now = self.probes.ended_at = self.clock()
        error = task.exception()
        about = {"backend": self.name}
        if error is None:
            self._examined(task.result())
        elif isinstance(error, UnisonoError):
            if self.failure is None or self.failure.code != error.code:
                log.warning("backend not ready", extra=about | {"code": error.code, "reason": error.message})
                self.failing_since = now
            self.probes.record_error(is_unreachable=kind_of(error) is BreakerFailure.UNREACHABLE)
            self.failure = error
            self._forget_sleeping(error)
            self._tried(error)
        else:
            log.error("probe failed unexpectedly", extra=about, exc_info=error)
        if self.failure is not None:
            self.waits.report_failed_probe()
        self._changed()

    def _examined(self, probe: Probe) -> None:
        before, self.examined = self.examined, probe
        if probe.fatal:
            if any(finding.check not in TEMPORARY_FAILURES for finding in probe.fatal):
                self.known = None
            if not isinstance(self.failure, BackendUnfit):
                self.failing_since = self.probes.ended_at
            self.failure = unfit(self.name, probe.fatal)
            self.probes.record_unfit()
            self._tried(BackendTimeout(self.failure.message))
        else:
            self.probes.record_pass(was_known=self.known is not None)
            if self.known is None or self.failure is not None:
                log.info("backend ready", extra={"backend": self.name})
                self.healthy_since = self.probes.ended_at
            self.known, self.failure, self.awaits_probe = probe.capabilities, None, False
            self._answered()
        can = probe.capabilities
        self.candidate.context = can.context
        optional = {BIAS: can.logit_bias, LOGPROBS: can.logprobs, PROMPT_LOGPROBS: can.prompt_logprobs}
        self.candidate.abilities = can.constrain.union(name for name, has in optional.items() if has)
        log_findings(self.name, probe, before)

    def _answered(self) -> None:
        """Handle a passed probe: settle a suspicion; after a cooldown or an outage, count a success."""
        now = self.clock()
        if self._suspicion.since is not None and self.probes.started_at >= self._suspicion.since:
            self._judge(now, fails=False)
        if self.probes.unreachable_since is not None or self.phase(now) is CircuitPhase.HALF_OPEN:
            self._forgiven(now, after_success(self.circuits, probed=True))
        if self.phase(now) is CircuitPhase.CLOSED:
            self.probes.unreachable_since = None

    def _tried(self, error: UnisonoError) -> None:
        """Handle a failed probe: it confirms a suspicion, and opens a half-open circuit again."""
        now = self.clock()
        kind = kind_of(error)
        if self._suspicion.since is not None and kind not in (None, BreakerFailure.OVERLOADED):
            self._judge(now, fails=True)
        if kind is not None and self.phase(now) is CircuitPhase.HALF_OPEN:
            self.circuits = after_failure(self.circuits, error, now, self.tolerance, uniform(0.9, 1.1))  # noqa: S311
            self._phased(CircuitPhase.HALF_OPEN, kind, now)

    async def aclose(self) -> None:
        await self.waking.aclose()
        await cancel_and_wait(self._probing)
        await self.endpoint.aclose()
