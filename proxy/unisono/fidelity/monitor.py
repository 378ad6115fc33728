"""Scoring of live answers while backends are idle, within a budget of tokens.

An answer is scored by the reference deployment, and also by the deployment that generated it if that deployment can
score. All these deployments must be idle. A request that arrives in the meantime cancels the scoring, so that no client
has to wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import random
from secrets import token_hex
from typing import Final, Protocol, cast

from unisono.core.alerts import Alert, AlertSink
from unisono.core.conversation import Json
from unisono.core.deployments import FidelityState, FidelityStatus
from unisono.core.frozen import dataclass
from unisono.core.generation import Capabilities, OutputForm, Prompt, Sampling, Timeouts
from unisono.core.ports import Backend
from unisono.core.scoring import ScoreJob, ScoringBackend, TokenScore
from unisono.core.tasks import cancel_all, cancel_and_wait
from unisono.errors import BackendError, ContextTooLong
from unisono.fidelity.drift import DriftDetector, DriftLimits, measure
from unisono.fidelity.runner import REQUEST_ID, generate

log = logging.getLogger("unisono.fidelity")

MAX_QUEUED: Final = 64
# Seconds between two checks whether backends are idle, before and while an answer is scored.
LOOK_S: Final = 0.02
# Seconds between two checks whether a quarantine is over.
RELEASE_S: Final = 1.0
# Pause after a request has cancelled a scoring, in seconds. The pause doubles with each further cancellation, so that a
# model with only short idle moments does not begin a scoring in each of them.
MIN_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 2.0
# Outcomes of an attempt to score an answer: a backend was busy, or a new request cancelled the scoring.
BUSY: Final = "busy"
CANCELLED: Final = "cancelled"
# Maximum number of tokens of an answer that are scored; llama.cpp needs a forward pass for each.
MAX_TOKENS: Final = 512


class WatchedDeployment(Protocol):
    """Deployment as the monitor sees it (`routing.deployment.LiveDeployment`)."""

    fidelity: FidelityStatus | None
    comparing: int

    @property
    def name(self) -> str: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def timeouts(self) -> Timeouts: ...
    @property
    def known(self) -> Capabilities | None: ...
    @property
    def is_idle(self) -> bool: ...

    def set_fidelity(self, status: FidelityStatus | None) -> None: ...


@dataclass(frozen=True, slots=True)
class LiveSample:
    """Answer of a deployment.

    `is_free` means that only the model decided on the tokens, without constraints or penalties. `tokens` is empty for a
    prompt that the shadow has yet to answer.
    """

    deployment: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    is_free: bool


@dataclass(frozen=True, slots=True)
class FidelityPlan:
    """Deployments of a model (`watched`) whose answers are compared with `reference`.

    The share `sample` (0 to 1) of the answers is scored, with at most `budget` tokens per hour. If there is a `shadow`,
    it is the only deployment in `watched`. The shadow repeats prompts that the reference has answered, and the shadow's
    answers are scored.
    """

    model: str
    reference: WatchedDeployment
    watched: Sequence[WatchedDeployment]
    sample: float
    budget: int
    limits: DriftLimits
    shadow: WatchedDeployment | None = None


# Callback that receives the model, the deployment and the outcome of a sample, which is `scored`, `failed`, `dropped`
# or `over_budget`.
CountSample = Callable[[str, str, str], None]


class FidelityMonitor:
    """Monitor that scores answers of the deployments of one model, and sets their fidelity."""

    def __init__(self, plan: FidelityPlan, sink: AlertSink, count: CountSample, clock: Callable[[], float]) -> None:
        self._plan = plan
        self._sink = sink
        self._count = count
        self._clock = clock
        self._live: dict[str, WatchedDeployment] = {}
        self._detectors: dict[str, DriftDetector] = {}
        self._queue: deque[LiveSample] = deque()
        self._arrived = asyncio.Event()
        self._salt = token_hex(16)
        self._budget, self._paid_at = float(plan.budget), clock()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def names(self) -> Collection[str]:
        """Names of the monitored deployments."""
        return [live.name for live in self._plan.watched]

    def start(self) -> None:
        """Set the fidelity of the monitored deployments, and score answers until `aclose` is called."""
        # A reload may rename deployments when the new pool starts, so earlier names may be outdated.
        self._live = {live.name: live for live in self._plan.watched}
        for live in self._plan.watched:
            detector = self._detectors[live.name] = DriftDetector(self._plan.limits, self._status(live))
            live.set_fidelity(detector.status)
        self._tasks = [
            asyncio.create_task(self._score_all(), name="score answers"),
            asyncio.create_task(self._release_all(), name="end quarantines"),
        ]

    def _status(self, live: WatchedDeployment) -> FidelityStatus:
        """Return the status that a deployment had before a reload, or a new status.

        The old status remains valid only if the reference is the same.
        """
        reference = self._plan.reference.name
        known = live.fidelity
        return known if known is not None and known.reference == reference else FidelityStatus(reference)

    async def aclose(self) -> None:
        await cancel_and_wait(*self._tasks)

    def offer(self, sample: LiveSample) -> None:
        """Queue an answer for scoring if it is drawn at random.

        If the deployment has a warning, all its answers are queued, so that a decision is reached soon.
        """
        shadow = self._plan.shadow
        is_repeated = shadow is not None and sample.deployment == self._plan.reference.name
        if shadow is not None and is_repeated:
            sample = LiveSample(shadow.name, sample.prompt, (), is_free=True)
        detector = self._detectors.get(sample.deployment)
        if detector is None or not (sample.tokens or is_repeated):
            return
        if detector.status.state is FidelityState.HEALTHY and random() >= self._plan.sample:  # noqa: S311
            return
        if len(self._queue) >= MAX_QUEUED:
            self._count(self._plan.model, sample.deployment, "dropped")
            return
        self._queue.append(sample)
        self._arrived.set()

    async def _release_all(self) -> None:
        while True:
            await asyncio.sleep(RELEASE_S)
            for live in self._plan.watched:
                if self._detectors[live.name].release(self._clock()):
                    self._changed(live, self._detectors[live.name].status)

    async def _score_all(self) -> None:
        pause_s = MIN_PAUSE_S
        while True:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            sample = self._queue.popleft()
            outcome = "failed"
            try:
                if not sample.tokens:
                    sample = await self._repeat(sample)
                outcome = await self._score(sample) if sample.tokens else "failed"
            except Exception as error:
                log.exception("an answer could not be scored", exc_info=error)
            if outcome == BUSY:
                self._queue.append(sample)
                await asyncio.sleep(LOOK_S)
            elif outcome == CANCELLED:
                self._queue.append(sample)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            else:
                self._count(self._plan.model, sample.deployment, outcome)
                pause_s = MIN_PAUSE_S

    async def _repeat(self, sample: LiveSample) -> LiveSample:
        """Let the shadow answer the prompt, and return the sample with the generated tokens.

        If the shadow cannot answer or the remaining budget is too small, the sample is returned without tokens.
        """
        live = self._live[sample.deployment]
        if live.known is None or live.known.output is not OutputForm.IDS or not self._pay(len(sample.prompt)):
            return sample
        try:
            with _comparing(live):
                tokens = await generate(live.backend, sample.prompt, MAX_TOKENS, live.timeouts, Sampling())
        except (BackendError, ContextTooLong) as error:
            log.info("a shadow did not answer", extra={"backend": live.name, "code": error.code})
            return sample
        self._pay(len(tokens))
        return replace(sample, tokens=tokens)

    async def _score(self, sample: LiveSample) -> str:
        live, reference = self._live[sample.deployment], self._plan.reference
        if not _scores(reference):
            return "failed"
        scoring = [reference, *([live] if _scores(live) else [])]
        targets = sample.tokens[:MAX_TOKENS]
        if not all(each.is_idle for each in scoring):
            return BUSY
        if not self._pay(len(scoring) * (len(sample.prompt) + len(targets))):
            return "over_budget"
        job = ScoreJob(
            Prompt(sample.prompt), targets, timeouts=live.timeouts, request_id=REQUEST_ID, cache_salt=self._salt
        )
        try:
            scores = await _scores_unless_busy(job, scoring)
        except (BackendError, ContextTooLong) as error:
            log.info("an answer could not be scored", extra={"backend": live.name, "code": error.code})
            return "failed"
        if scores is None:
            return CANCELLED
        self._add(live, scores[0], scores[1] if len(scores) > 1 else (), is_free=sample.is_free)
        return "scored"

    def _pay(self, tokens: int) -> bool:
        """Subtract tokens from the budget. If too few are left, return False and subtract nothing."""
        now, budget = self._clock(), self._plan.budget
        self._budget = min(self._budget + (now - self._paid_at) * budget / 3600, float(budget))
        self._paid_at = now
        if tokens > self._budget:
            return False
        self._budget -= tokens
        return True

    def _add(
        self,
        live: WatchedDeployment,
        reference: Sequence[TokenScore | None],
        own: Sequence[TokenScore | None],
        *,
        is_free: bool,
    ) -> None:
        detector = self._detectors[live.name]
        before = detector.status.state
        if before is FidelityState.QUARANTINED:
            # The answer was generated before the quarantine.
            return
        status = detector.add(measure(reference, own, is_sampled_freely=is_free), self._clock())
        if status.state is before:
            live.set_fidelity(status)
        else:
            self._changed(live, status)

    def _changed(self, live: WatchedDeployment, status: FidelityStatus) -> None:
        before = FidelityState.HEALTHY if live.fidelity is None else live.fidelity.state
        live.set_fidelity(status)
        is_good = status.state is FidelityState.HEALTHY or before is FidelityState.QUARANTINED
        log.log(
            logging.INFO if is_good else logging.WARNING,
            "backend fidelity changed",
            extra={"backend": live.name, "state": status.state.value, "exceeded": list(status.exceeded)},
        )
        self._sink(to_alert(self._plan.model, live.name, before, status))


def to_alert(model: str, name: str, before: FidelityState, status: FidelityStatus) -> Alert:
    """Return the alert for a deployment whose state changed from `before`."""
    limits = " and ".join(status.exceeded)
    event, text = {
        FidelityState.HEALTHY: ("fidelity_recovered", "computes the same as the reference again"),
        FidelityState.WARNING: ("fidelity_warning", f"is beyond the limit of {limits}"),
        FidelityState.QUARANTINED: ("fidelity_quarantined", f"is quarantined: beyond the limit of {limits}"),
    }[status.state]
    if before is FidelityState.QUARANTINED:
        event, text = "fidelity_readmitted", "is used again, on trial"
    facts: Mapping[str, Json] = {
        "subject": f"backend {name} of {model}",
        "reference": status.reference,
        "agreement": status.agreement,
        "divergence": status.divergence,
        "implausible": status.implausible,
    }
    # The identity contains the number of quarantines, so that each quarantine has its own alerts.
    identity = f"{event} {name} of {model} {status.quarantines}"
    return Alert(identity, event, "backend", f"The backend {name} of {model} {text}.", facts)


@contextmanager
def _comparing(live: WatchedDeployment) -> Iterator[None]:
    live.comparing += 1
    try:
        yield
    finally:
        live.comparing -= 1


def _scores(live: WatchedDeployment) -> bool:
    return live.known is not None and live.known.scores and isinstance(live.backend, ScoringBackend)


async def _scores_unless_busy(
    job: ScoreJob, deployments: Sequence[WatchedDeployment]
) -> list[Sequence[TokenScore | None]] | None:
    """Return the scores from each deployment, in the order of `deployments`.

    Returns None if a request arrives at any of these deployments in the meantime.
    """

    async def score() -> list[Sequence[TokenScore | None]]:
        found = []
        for each in deployments:
            with _comparing(each):
                found.append(await cast(ScoringBackend, each.backend).score(job))
        return found

    running = asyncio.create_task(score(), name="score an answer")
    try:
        while not running.done():
            await asyncio.wait({running}, timeout=LOOK_S)
            if not running.done() and not all(each.is_idle for each in deployments):
                return None
        return running.result()
    finally:
        await cancel_all(running)
