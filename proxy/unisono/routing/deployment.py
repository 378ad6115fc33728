"""One live backend of a model name: what it can do, whether it is well, and what runs on it.

It is probed once, by whoever needs it first or in the background at start, and again when it failed: at once where it
seems to be gone, so that whoever comes next goes elsewhere, and often until it is back. A failed probe is remembered
for a moment only. One that is found unfit is not used, however well it answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from random import uniform
from typing import cast

from unisono.core.generation import Capabilities, Load, Timeouts
from unisono.core.ports import Backend, Endpoint, PassthroughBackend
from unisono.core.probe import PASSING, Probe
from unisono.core.tasks import cancel_and_wait
from unisono.errors import BackendTimeout, BackendUnfit, UnisonoError
from unisono.routing.attempt_limits import AttemptTimes, MinTimeouts
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
from unisono.routing.findings import log_findings, unfit, with_context
from unisono.routing.first_token_waits import FirstTokenWaits, GenerationActivity
from unisono.routing.policy import ANSWER_WORK, BIAS, Candidate, Rank, Share
from unisono.routing.rate_window import rate_of
from unisono.routing.tie_break import number_of

FAILURE_REMEMBERED_S = 2.0
DOUBTFUL = frozenset({BreakerFailure.UNREACHABLE, BreakerFailure.PROTOCOL})  # failures that may be a death
DOUBTED_EVERY_S = 1.0
"""Between two probes of a deployment that may have died, or did not long ago, in seconds."""
BACK_SOON_S = 60.0
"""How long one that is gone is expected back at any moment: what is restarted by whoever watches over it is."""
FAILING_EVERY_S = 4.0  # between two probes of one that fails in another way, hangs, or is gone for good
CHECK_EVERY_S = 30.0
"""How long a deployment may be neither used nor probed, in seconds, before it is asked again whether it is there."""
IDLE_AT_MOST_S = 600.0
"""What that grows to, doubling, while nobody uses it: a laptop's model is not to be woken for nothing."""
UNFIT_AT_MOST_S = 30.0
"""What the pause between probes of an unfit deployment grows to: each of them makes it generate."""
FOREIGN_PROMPT = 1024
"""What a prompt of somebody else's that the server has not begun is taken for, in tokens."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeploymentConfig:
    """How a deployment is to be used. `name` is public: it holds no address and no path. Of the deployments of one
    model those of the lowest `order` come first, and share by `weight`; `max_requests` and `max_tokens` bound what runs
    on it at once, `requests_per_minute` and `tokens_per_minute` what begins in any minute."""

    name: str
    timeouts: Timeouts = field(default_factory=Timeouts)
    min_timeouts: MinTimeouts = field(default_factory=MinTimeouts)
    weight: int = 1
    order: int = 0
    max_requests: int | None = None
    max_tokens: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class SlotReservation:
    """A place that is taken, and when (monotonic seconds)."""

    live: LiveDeployment
    share: Share
    at: float = 0.0


class LiveDeployment:
    """`endpoint` speaks Harmony, or it `passes`: then it answers in OpenAI's own API. `context` caps the window the
    backend claims, in tokens, and stands in where it claims none. `identity` tells whether another configuration means
    the same backend. `listeners` are called when something may have become possible: a place is free, or it is well
    again."""

    def __init__(
        self,
        terms: DeploymentConfig | str,
        endpoint: Endpoint,
        *,
        passes: bool = False,
        context: int | None = None,
        identity: object = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.terms = DeploymentConfig(terms) if isinstance(terms, str) else terms
        self.endpoint = endpoint
        self.passes = passes
        self.context = context
        self.identity = identity
        self.clock = clock
        self.tolerance = BreakerConfig()
        self.listeners: list[Callable[[], None]] = []
        self.on_doubt: Callable[[], None] | None = None  # called when it had better be probed now
        self.candidate = Candidate(self.terms.name, bit=0, context=context, rank=Rank.UNKNOWN)
        self.become(self.terms)
        self.circuits: Circuits = {}
        self.times = AttemptTimes()
        self.waits = FirstTokenWaits()
        self.generation = GenerationActivity()
        self.known: Capabilities | None = None  # by the last good probe; None after a rest, and when it is unfit
        self.examined: Probe | None = None  # the last probe that ended, good or bad
        self.failure: UnisonoError | None = None
        """Why the last probe failed; None when it did not, or when it served a request since."""
        self.asked_at = 0.0  # the last request
        self.well_since = self.failing_since = clock()
        """When it last became what it is, apart from its circuits: known and with a good last probe, or not."""
        self._doubted = False  # whether a request failed as if it were dead, and it was not probed since
        self._suspicion = Suspicion()
        self._gone_since: float | None = None
        """When a probe found that it cannot be reached; None when none did, or when it was well again since."""
        self._probed_at = self._probing_from = self._used_at = 0.0
        self._unfit = 0
        """Probes in a row that found it unfit."""
        self._idle = 0
        """Good probes in a row without a use between them."""
        self._probing: asyncio.Task[Probe] | None = None

    @property
    def name(self) -> str:
        return self.terms.name

    @property
    def backend(self) -> Backend:
        """Of one that does not pass: whoever asks for the other kind is never given a place on it."""
        return cast(Backend, self.endpoint)

    @property
    def passing(self) -> PassthroughBackend:
        """Of one that passes."""
        return cast(PassthroughBackend, self.endpoint)

    @property
    def timeouts(self) -> Timeouts:
        return self.terms.timeouts

    def become(self, terms: DeploymentConfig) -> None:
        """To be used in another way from now on."""
        self.terms = terms
        one = self.candidate
        one.name, one.seed, one.weight, one.order = terms.name, number_of(terms.name), terms.weight, terms.order
        rate = rate_of(terms.requests_per_minute, terms.tokens_per_minute, one.rate)
        one.bound(terms.max_requests, terms.max_tokens, rate)

    def phase(self, now: float) -> CircuitPhase:
        return phase_of(self.circuits, now)

    def refresh(self, now: float) -> None:
        """Have the candidate say what is true now: rests and minutes end by themselves."""
        self.candidate.rank = self._rank(now)
        if self.candidate.rate is not None:
            self.candidate.rate.move(now)

    def _rank(self, now: float) -> Rank:
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
        return Rank.WELL if self.known is not None else Rank.UNKNOWN

    def hold(self, share: Share) -> SlotReservation:
        """Somebody was given a share of it."""
        self.asked_at = self.clock()
        return SlotReservation(self, share, self.asked_at)

    def give_back(self, hold: SlotReservation) -> None:
        hold.share.give_back(self.clock())
        self._changed()

    def claimed(self, load: Load | None) -> None:
        """What the server says of its load, or that it does not; what the gateway gave it is known better."""
        one = self.candidate
        others = 0 if load is None else max(load.running + load.waiting - one.running, 0)
        waiting = 0 if load is None else min(load.waiting, others)
        # What runs was read, as with the gateway's own.
        one.foreign_requests, one.foreign = others, others * ANSWER_WORK + waiting * FOREIGN_PROMPT

    def failed(self, error: UnisonoError, identity: str = "") -> None:
        """A generation on it ended in `error`. `identity` tells whose, empty for nobody's: one identity alone never
        has it rest, unless a probe fails too."""
        kind = kind_of(error)
        if kind is None:
            return
        now = self.clock()
        before = self.phase(now)
        if is_independent(error) or (self.passes and before is CircuitPhase.HALF_OPEN):
            identity = ""
        jitter = uniform(0.9, 1.1)  # noqa: S311
        self.circuits = after_failure(self.circuits, error, now, self.tolerance, jitter, identity=identity)
        row = self.circuits[kind].failures
        log.warning("backend failed", extra={"backend": self.name, "code": error.code, "kind": kind.value, "row": row})
        self._phased(before, kind, now)
        is_suspect = self._suspicion.failed(self.circuits, self.tolerance, now)
        if is_suspect and self.passes:
            self._judge(now, fails=not self._suspicion.has_served(self.circuits, self.tolerance))
        self._doubted = self._doubted or kind in DOUBTFUL
        if (kind in DOUBTFUL or is_suspect) and self.on_doubt is not None:
            self.on_doubt()

    def _judge(self, now: float, *, fails: bool) -> None:
        """It is known whether the suspect fails by itself."""
        before, suspects, jitter = self.phase(now), suspected(self.circuits, self.tolerance), uniform(0.9, 1.1)  # noqa: S311
        self.circuits = self._suspicion.judged(self.circuits, self.tolerance, now, fails=fails, jitter=jitter)
        for kind, caller in suspects.items():
            if fails:
                self._phased(before, kind, now)
            else:
                log.warning("only one caller's requests fail", extra={"backend": self.name, "caller": caller})

    def succeeded(self, begun: float = inf) -> None:
        """It served a request that had `begun` then: proof enough that it is there."""
        now = self.clock()
        self._used_at, self._idle = now, 0
        self._suspicion.served(begun, now)
        if self.circuits:
            self._forgiven(now, after_success(self.circuits, begun))
        if self.failure is not None and self.known is not None:
            log.info("backend ready", extra={"backend": self.name})
            self.failure, self._gone_since, self.well_since = None, None, now
            self._changed()

    def _forgiven(self, now: float, circuits: Circuits) -> None:
        before = self.phase(now)
        self.circuits = circuits
        if before is not CircuitPhase.CLOSED and self.phase(now) is CircuitPhase.CLOSED:
            self.well_since = now
            log.info("backend well again", extra={"backend": self.name})
        self._changed()

    def _phased(self, before: CircuitPhase, kind: BreakerFailure, now: float) -> None:
        if self.phase(now) is CircuitPhase.OPEN and before is not CircuitPhase.OPEN:
            rest_s = round(rests_until(self.circuits) - now, 1)
            log.warning("backend rests", extra={"backend": self.name, "kind": kind.value, "rest_s": rest_s})
            if kind is not BreakerFailure.OVERLOADED:
                # Have the next user probe again: what comes back after a failure may be another server.
                self.known = None
        self._changed()

    def _changed(self) -> None:
        self.refresh(self.clock())
        for listener in self.listeners:
            listener()

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
            self._doubted, self._probing_from = False, self.clock()
            self.waits.postpone_probes(self._probing_from + FAILING_EVERY_S)
            self._probing = asyncio.create_task(self._probe(), name=f"probe {self.name}")
            self._probing.add_done_callback(self._probed)
        # Shielded: a client that leaves must not end the probe others wait for.
        probe = await asyncio.shield(self._probing)
        if probe.fatal:
            raise unfit(self.name, probe.fatal)
        return probe

    def stale(self, now: float) -> bool:
        """Whether it is time to probe again."""
        since = now - self._probed_at
        if self._doubted or self.waits.next_probe_at <= now:
            return since >= DOUBTED_EVERY_S
        if self._suspicion.since is not None:
            return self._suspicion.is_due(now, self._probed_at)
        phase = self.phase(now)
        if phase is CircuitPhase.HALF_OPEN:
            # A probe goes before the first client's request.
            return True
        if phase is CircuitPhase.OPEN and self._gone_since is None:
            # It is there and fails all the same: that it answers a probe would prove nothing.
            return False
        if self.failure is not None or self._gone_since is not None:
            soon = DOUBTED_EVERY_S if self.urgent(now) else FAILING_EVERY_S
            return since >= (self._patience if self._unfit else soon)
        pause = min(CHECK_EVERY_S * 2.0**self._idle, IDLE_AT_MOST_S)
        return self.known is None or now - max(self._probed_at, self._used_at) >= pause

    def urgent(self, now: float) -> bool:
        """Whether it is to be probed as soon and as often as may be: it may have died, or be back."""
        is_doubted = self._doubted or self._suspicion.since is not None
        return is_doubted or (self._gone_since is not None and now - self._gone_since < BACK_SOON_S)

    @property
    def _patience(self) -> float:
        """How long a failure stands, in seconds."""
        return min(FAILURE_REMEMBERED_S * 2.0 ** max(self._unfit - 1, 0), UNFIT_AT_MOST_S)

    async def _probe(self) -> Probe:
        try:
            # Generous, because probing an engine of our own starts it and loads the model.
            async with asyncio.timeout(self.timeouts.first_token_s):
                found = await self.endpoint.probe()
        except TimeoutError:
            raise BackendTimeout(f"{self.name} did not say in time what it can do.") from None
        return with_context(found, self.context)

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
                self.failing_since = self._probed_at
            if kind_of(error) is BreakerFailure.UNREACHABLE and self._gone_since is None:
                self._gone_since = self._probed_at
            self.failure = error
            self._tried(error)
        else:
            log.error("probe failed unexpectedly", extra=about, exc_info=error)
        if self.failure is not None:
            self.waits.report_failed_probe()
        self._changed()

    def _examined(self, probe: Probe) -> None:
        before, self.examined = self.examined, probe
        if probe.fatal:
            if any(finding.check not in PASSING for finding in probe.fatal):
                self.known = None
            if not isinstance(self.failure, BackendUnfit):
                self.failing_since = self._probed_at
            self.failure, self._unfit, self._idle = unfit(self.name, probe.fatal), min(self._unfit + 1, 10), 0
            self._tried(BackendTimeout(self.failure.message))
        else:
            self._unfit, self._idle = 0, min(self._idle + 1, 10) if self.known is not None else 0
            if self.known is None or self.failure is not None:
                log.info("backend ready", extra={"backend": self.name})
                self.well_since = self._probed_at
            self.known, self.failure = probe.capabilities, None
            self._answered()
        can = probe.capabilities
        self.candidate.context = can.context
        self.candidate.abilities = can.constrain | {BIAS} if can.logit_bias else can.constrain
        log_findings(self.name, probe, before)

    def _answered(self) -> None:
        """A probe went well, which counts where it was to tell whether a rest is over: behind the rest, or amid one for
        a deployment that was gone."""
        now = self.clock()
        if self._suspicion.since is not None and self._probing_from >= self._suspicion.since:
            self._judge(now, fails=False)
        if self._gone_since is not None or self.phase(now) is CircuitPhase.HALF_OPEN:
            self._forgiven(now, after_success(self.circuits, probed=True))
        if self.phase(now) is CircuitPhase.CLOSED:
            self._gone_since = None

    def _tried(self, error: UnisonoError) -> None:
        """A probe failed: where it was to tell whether a rest is over, it is not, and a suspect fails by itself."""
        now = self.clock()
        kind = kind_of(error)
        if self._suspicion.since is not None and kind not in (None, BreakerFailure.OVERLOADED):
            self._judge(now, fails=True)
        if kind is not None and self.phase(now) is CircuitPhase.HALF_OPEN:
            self.circuits = after_failure(self.circuits, error, now, self.tolerance, uniform(0.9, 1.1))  # noqa: S311
            self._phased(CircuitPhase.HALF_OPEN, kind, now)

    async def aclose(self) -> None:
        await cancel_and_wait(self._probing)
        await self.endpoint.aclose()
