"""Detection of drift in the scores of live answers. Pure: the clock is an argument.

A deployment exceeds a limit if the whole confidence interval of a measure is beyond the limit. The first time, the
deployment gets a warning. From then on, only new answers are taken into account. If they exceed a limit too, the
deployment is quarantined for some time. After the quarantine, the deployment has a warning again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import field, replace
from math import sqrt
from typing import Final

from unisono.core.deployments import FidelityState, FidelityStatus
from unisono.core.frozen import dataclass
from unisono.fidelity.comparison import Scores, agrees
from unisono.fidelity.statistics import divergence

# Number of answers in a window. Older answers are dropped.
WINDOW: Final = 300
# Minimum numbers of answers and of tokens for a decision.
MIN_ANSWERS: Final = 10
MIN_TOKENS: Final = 200
# Minimum number of answers with a difference for a decision. Wilson's interval is too narrow for two or three events.
MIN_AFFECTED: Final = 4
# Quantile of the normal distribution for a decision. There is a decision after each answer, so a usual interval of 95 %
# would soon be beyond a limit by chance.
Z_DECISION: Final = 4.0
# Number of new answers within the limits after which a warning ends.
CLEARED_AFTER: Final = 50
# A token is implausible if its log probability by the reference is lower, in nats. Its probability is then below one in
# a million.
IMPLAUSIBLE_NATS: Final = -14.0
# Maximum duration of a quarantine, as a multiple of the first one. The duration doubles with each quarantine.
MAX_QUARANTINE_FACTOR: Final = 32


@dataclass(frozen=True, slots=True)
class DriftLimits:
    """Limits of the measures.

    `agreement` is the minimum share of tokens for which the deployment and the reference make the same choice,
    `divergence` the maximum mean divergence in nats, and `implausible` the maximum share of implausible tokens. The
    first quarantine lasts `quarantine_s` seconds. If `quarantine_s` is 0, there are only warnings.
    """

    agreement: float = 0.995
    divergence: float = 0.002
    implausible: float = 0.0003
    quarantine_s: float = 900.0


@dataclass(frozen=True, slots=True)
class AnswerMeasure:
    """Measures of one answer.

    For `disagreeing` of `compared` tokens, the deployment and the reference consider different tokens most likely.
    `nats` is the sum of the divergences of all `compared` tokens. According to the reference, `implausible` of `judged`
    tokens were practically impossible.
    """

    compared: int = 0
    disagreeing: int = 0
    nats: float = 0.0
    judged: int = 0
    implausible: int = 0


def measure(reference: Scores, other: Scores, *, is_sampled_freely: bool) -> AnswerMeasure:
    """Return the measures of an answer from its scores.

    `other` contains the scores from the deployment itself; it is empty if the deployment cannot score.
    `is_sampled_freely` means that only the model decided on the tokens.
    """
    pairs = [(one, two) for one, two in zip(reference, other, strict=False) if one is not None and two is not None]
    known = [one.logprob for one in reference if one is not None and one.logprob is not None]
    return AnswerMeasure(
        compared=len(pairs),
        disagreeing=sum(not agrees(one, two) for one, two in pairs),
        nats=sum(divergence(one.top, two.top) for one, two in pairs),
        judged=len(known) if is_sampled_freely else 0,
        implausible=sum(value < IMPLAUSIBLE_NATS for value in known) if is_sampled_freely else 0,
    )


@dataclass(slots=True)
class RatioWindow:
    """Ratio of two sums over the last `WINDOW` answers, with its variance between answers."""

    _answers: deque[tuple[float, int]] = field(default_factory=deque)
    # Sums of total, count, total squared, total times count, count squared, and affected answers.
    _sums: list[float] = field(default_factory=lambda: [0.0] * 6)

    def add(self, total: float, count: int) -> None:
        if not count:
            return
        self._answers.append((total, count))
        self._change(total, count, 1)
        if len(self._answers) > WINDOW:
            self._change(*self._answers.popleft(), -1)

    def _change(self, total: float, count: int, sign: int) -> None:
        for at, value in enumerate((total, count, total * total, total * count, count * count, total > 0)):
            self._sums[at] += sign * value

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def tokens(self) -> int:
        return round(self._sums[1])

    @property
    def value(self) -> float | None:
        return self._sums[0] / self._sums[1] if self._answers else None

    @property
    def is_enough(self) -> bool:
        is_long = len(self._answers) >= MIN_ANSWERS and self._sums[1] >= MIN_TOKENS
        return is_long and self._sums[5] >= MIN_AFFECTED

    def lower_bound(self, *, is_share: bool) -> float:
        """Return the lower bound of the ratio's confidence interval.

        With `is_share`, the ratio is a share of tokens, and the bound also allows for chance within the answers.
        """
        total, count, squares, products, counts, _ = self._sums
        size, value = len(self._answers), total / count
        variance = max(squares - 2 * value * products + value**2 * counts, 0.0) * size / (size - 1) / count**2
        if not is_share:
            return value - Z_DECISION * sqrt(variance)
        # Wilson's interval with the effective number of tokens.
        binomial = value * (1 - value) / count
        effective = count / max(variance / binomial, 1.0) if binomial else count
        square = Z_DECISION**2 / effective
        spread = sqrt(square * value * (1 - value) + square**2 / 4)
        return (value + square / 2 - spread) / (1 + square)


class DriftDetector:
    """Detector of drift of one deployment. `status` is the deployment's status so far."""

    def __init__(self, limits: DriftLimits, status: FidelityStatus) -> None:
        self.limits = limits
        self.status = status
        self._windows = _new_windows()

    def add(self, measured: AnswerMeasure, now: float) -> FidelityStatus:
        """Add the measures of an answer, and return the new status of the deployment."""
        windows = self._windows
        windows["agreement"].add(measured.disagreeing, measured.compared)
        windows["divergence"].add(measured.nats, measured.compared)
        windows["implausible"].add(measured.implausible, measured.judged)
        exceeded = self._exceeded()
        answers = max(map(len, windows.values()))
        before = self.status
        state, restarts = next_state(before.state, is_exceeded=bool(exceeded), answers=answers)
        if state is FidelityState.QUARANTINED and not self.limits.quarantine_s:
            state, restarts = FidelityState.WARNING, False
        self.status = replace(self._measured(), state=state, exceeded=exceeded)
        if state is FidelityState.QUARANTINED:
            factor = min(2**before.quarantines, MAX_QUARANTINE_FACTOR)
            self.status = replace(
                self.status, until=now + self.limits.quarantine_s * factor, quarantines=before.quarantines + 1
            )
        elif state is FidelityState.HEALTHY:
            self.status = replace(self.status, quarantines=0)
        if restarts:
            self._windows = _new_windows()
        return self.status

    def release(self, now: float) -> bool:
        """End the quarantine if its time is over; return whether this call ended it.

        The deployment then has a warning, is used again, and is judged by its next answers.
        """
        if self.status.state is not FidelityState.QUARANTINED or now < self.status.until:
            return False
        self._windows = _new_windows()
        self.status = replace(self.status, state=FidelityState.WARNING)
        return True

    def _exceeded(self) -> tuple[str, ...]:
        limits: Mapping[str, float] = {
            "agreement": 1 - self.limits.agreement,
            "divergence": self.limits.divergence,
            "implausible": self.limits.implausible,
        }
        return tuple(
            name
            for name, window in self._windows.items()
            if window.is_enough and window.lower_bound(is_share=name != "divergence") > limits[name]
        )

    def _measured(self) -> FidelityStatus:
        windows = self._windows
        disagreement = windows["agreement"].value
        return replace(
            self.status,
            answers=max(map(len, windows.values())),
            tokens=max(window.tokens for window in windows.values()),
            agreement=None if disagreement is None else 1 - disagreement,
            divergence=windows["divergence"].value,
            implausible=windows["implausible"].value,
        )


def _new_windows() -> dict[str, RatioWindow]:
    return {name: RatioWindow() for name in ("agreement", "divergence", "implausible")}


def next_state(state: FidelityState, *, is_exceeded: bool, answers: int) -> tuple[FidelityState, bool]:
    """Return the state after an answer, and whether to discard all measures so far.

    `answers` is the number of answers that have been measured in the current state, `state`.
    """
    match state:
        case FidelityState.HEALTHY if is_exceeded:
            return FidelityState.WARNING, True
        case FidelityState.WARNING if is_exceeded:
            return FidelityState.QUARANTINED, True
        case FidelityState.WARNING if answers >= CLEARED_AFTER:
            return FidelityState.HEALTHY, False
        case _:
            return state, False
