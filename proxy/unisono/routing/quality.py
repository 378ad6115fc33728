"""Quality of a deployment's answers, compared with the others of its group. Pure.

A deployment whose share of faulty answers is clearly higher than that of the others gets a lower level, and with it a
part of its weight. Only answers to comparable requests are compared. So a client whose requests no model can satisfy
changes nothing, even if all its requests go to one deployment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from enum import IntEnum
from math import sqrt
from typing import Final

from unisono.core.answer_faults import AnswerFault, faults_by_deployment
from unisono.core.frozen import dataclass
from unisono.core.observer import GenerationDone, GenerationStarted, Observer

# Answers after which all counts are halved, so that old answers lose influence.
MAX_ANSWERS: Final = 2000.0
# Seconds after which all counts are halved.
HALVING_S: Final = 6 * 3600.0
# Answers to comparable requests that a comparison needs, from the deployment and from the others.
MIN_ANSWERS: Final = 50.0
# Answers of a deployment between two comparisons.
COMPARED_EVERY: Final = 10
# Workloads that a deployment distinguishes; the one that was not used for the longest time is dropped.
MAX_WORKLOADS: Final = 64
# Quantile of the normal distribution for a two-sided interval of 99 %. Answers are compared again and again.
Z_99: Final = 2.575829
# Level limits as multiples of the others' share of faulty answers, and the least limits. A difference between one and
# two faulty answers in a thousand must have no effect.
HALF_FACTOR: Final = 2.0
HALF_SHARE: Final = 0.01
QUARTER_FACTOR: Final = 4.0
QUARTER_SHARE: Final = 0.02


class QualityLevel(IntEnum):
    """Level of a deployment: the quarters of its weight that it keeps."""

    QUARTER = 1
    HALF = 2
    FULL = 4


@dataclass(slots=True)
class Tally:
    """Decayed numbers of answers and of faulty ones."""

    answers: float = 0.0
    faulty: float = 0.0

    def halve(self) -> None:
        self.answers /= 2
        self.faulty /= 2


@dataclass(slots=True)
class QualityRecord:
    """Decayed counts of the answers of one deployment, and its level."""

    level: QualityLevel = QualityLevel.FULL
    total: Tally = field(default_factory=Tally)
    workloads: OrderedDict[int, Tally] = field(default_factory=OrderedDict)
    faults: dict[AnswerFault, float] = field(default_factory=dict)
    halved_at: float | None = None
    # Answers since the last comparison.
    new_answers: int = 0

    def record(self, faults: Collection[AnswerFault], workload: int, now: float) -> bool:
        """Count an answer, and return whether a comparison is due."""
        self._decay(now)
        tally = self.workloads.get(workload)
        if tally is None:
            tally = self.workloads[workload] = Tally()
            if len(self.workloads) > MAX_WORKLOADS:
                self.workloads.popitem(last=False)
        else:
            self.workloads.move_to_end(workload)
        for counts in (self.total, tally):
            counts.answers += 1
            counts.faulty += bool(faults)
        for fault in faults:
            self.faults[fault] = self.faults.get(fault, 0.0) + 1
        self.new_answers += 1
        return self.new_answers >= COMPARED_EVERY

    def _decay(self, now: float) -> None:
        if self.halved_at is None:
            self.halved_at = now
        while now - self.halved_at >= HALVING_S and self.total.answers >= 1:
            self.halved_at += HALVING_S
            self._halve()
        if self.total.answers < 1:
            self.halved_at = now
        if self.total.answers >= MAX_ANSWERS:
            self._halve()

    def _halve(self) -> None:
        for tally in (self.total, *self.workloads.values()):
            tally.halve()
        self.faults = {fault: count / 2 for fault, count in self.faults.items()}

    def compare(self, others: Sequence[QualityRecord]) -> bool:
        """Compare with the other deployments of the group, and return whether the level changed."""
        self.new_answers = 0
        before, self.level = self.level, level_of(self, others)
        return self.level is not before


def level_of(record: QualityRecord, others: Sequence[QualityRecord]) -> QualityLevel:
    """Return the level by a comparison; the full one if there are too few answers."""
    # A bad deployment must not hide the next one.
    good = [other for other in others if other.level is QualityLevel.FULL]
    compared = _comparable(record, good) or _comparable(record, others)
    if compared is None:
        return QualityLevel.FULL
    own, reference = compared
    return next_level(record.level, own, reference)


def _comparable(record: QualityRecord, others: Sequence[QualityRecord]) -> tuple[tuple[float, float], float] | None:
    """Return the interval of the own faulty share, and the upper bound of the others'.

    The others' share is that for the workloads of this deployment. None if there are too few answers.
    """
    own, expected, compared = Tally(), 0.0, 0.0
    for workload, tally in record.workloads.items():
        found = [other.workloads[workload] for other in others if workload in other.workloads]
        if (answers := sum(each.answers for each in found)) < 1:
            continue
        compared += answers
        own.answers += tally.answers
        own.faulty += tally.faulty
        expected += tally.answers * sum(each.faulty for each in found) / answers
    if min(own.answers, compared) < MIN_ANSWERS:
        return None
    share = min(expected / own.answers, 1.0)
    return wilson(own.faulty / own.answers, own.answers), wilson(share, compared)[1]


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return Wilson's interval of 99 % for a share of `count` answers."""
    square = Z_99**2 / count
    centre, spread = share + square / 2, sqrt(square * share * (1 - share) + square**2 / 4)
    return max((centre - spread) / (1 + square), 0.0), min((centre + spread) / (1 + square), 1.0)


def next_level(level: QualityLevel, own: tuple[float, float], reference: float) -> QualityLevel:
    """Return the level after a comparison: lowered by the lower bound, raised by the upper one."""
    low, high = own
    half = max(HALF_FACTOR * reference, HALF_SHARE)
    quarter = max(QUARTER_FACTOR * reference, QUARTER_SHARE)
    if low > quarter:
        return QualityLevel.QUARTER
    if high < half:
        return QualityLevel.FULL
    if low > half:
        level = min(level, QualityLevel.HALF)
    if high < quarter:
        level = max(level, QualityLevel.HALF)
    return level


@dataclass(frozen=True, slots=True)
class DeploymentQuality:
    """Quality of a deployment for its status.

    `answers` is the decayed number of answers. `faulty_per_thousand` and `faults` count faulty ones per thousand;
    an answer may have several faults. `weight` is the part of its weight that the deployment keeps.
    """

    answers: int = 0
    faulty_per_thousand: float = 0.0
    faults: Mapping[str, float] = field(default_factory=dict)
    weight: float = 1.0


def quality_of(record: QualityRecord, *, is_weighted: bool) -> DeploymentQuality:
    """Return the quality for the status."""
    answers = record.total.answers
    if not answers:
        return DeploymentQuality()
    return DeploymentQuality(
        answers=round(answers),
        faulty_per_thousand=round(1000 * record.total.faulty / answers, 1),
        faults={fault.value: round(1000 * count / answers, 1) for fault, count in record.faults.items()},
        weight=record.level / QualityLevel.FULL if is_weighted else 1.0,
    )


# Receives the name of a deployment, the faults of its answer, and the workload.
RecordAnswer = Callable[[str, Collection[AnswerFault], int], None]


class QualityObserver(Observer):
    """Observer that attributes the faults of answers to deployments."""

    def __init__(self, record: RecordAnswer) -> None:
        self._record = record

    def generation_started(self, began: GenerationStarted) -> None:
        """Do nothing: answers count when they have ended."""

    def ended(self, done: GenerationDone) -> None:
        for deployment, faults in faults_by_deployment(done).items():
            self._record(deployment, faults, done.start.workload)
