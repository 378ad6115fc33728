"""Quality of a deployment's answers, compared with the other deployments of its group. Pure.

A deployment whose share of faulty answers is clearly higher than the share of the others gets a lower level, and thus a
lower weight. Only answers to comparable requests are compared. So a client whose requests no model can satisfy changes
nothing, even if all its requests go to one deployment.
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

# Number of answers after which all counts are halved, so that old answers lose influence.
MAX_ANSWERS: Final = 2000.0
# Seconds after which all counts are halved.
HALVING_S: Final = 6 * 3600.0
# Minimum number of answers to comparable requests for a comparison, both of the deployment and of the others together.
MIN_ANSWERS: Final = 50.0
# Number of answers of a deployment between two comparisons.
COMPARED_EVERY: Final = 10
# Maximum number of workloads that are counted separately for a deployment. The least recently used one is dropped.
MAX_WORKLOADS: Final = 64
# Quantile of the normal distribution for a two-sided interval of 99 %. It is wide because there are many comparisons.
Z_99: Final = 2.575829
# A level changes at a multiple of the others' share of faulty answers, but never below a minimum share. A difference
# between one and two faulty answers in a thousand must have no effect.
HALF_FACTOR: Final = 2.0
HALF_SHARE: Final = 0.01
QUARTER_FACTOR: Final = 4.0
QUARTER_SHARE: Final = 0.02


class QualityLevel(IntEnum):
    """Level of a deployment: the number of quarters of its configured weight that it gets."""

    QUARTER = 1
    HALF = 2
    FULL = 4


@dataclass(slots=True)
class Tally:
    """Number of answers and number of faulty answers; old answers count for less than 1."""

    answers: float = 0.0
    faulty: float = 0.0

    def halve(self) -> None:
        self.answers /= 2
        self.faulty /= 2


@dataclass(slots=True)
class QualityRecord:
    """Quality level of one deployment, and counts of its answers; old answers count for less."""

    level: QualityLevel = QualityLevel.FULL
    total: Tally = field(default_factory=Tally)
    workloads: OrderedDict[int, Tally] = field(default_factory=OrderedDict)
    faults: dict[AnswerFault, float] = field(default_factory=dict)
    halved_at: float | None = None
    # Answers since the last comparison.
    new_answers: int = 0

    def record(self, faults: Collection[AnswerFault], workload: int, now: float) -> bool:
        """Count an answer, and return whether a comparison is due.

        `faults` is empty for a good answer. `workload` is equal for comparable requests. `now` is monotonic seconds.
        """
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
    """Return the level after a comparison; `FULL` if there are too few answers to compare."""
    # Compare with deployments of full level if possible: a bad reference would hide another bad deployment.
    good = [other for other in others if other.level is QualityLevel.FULL]
    compared = _comparable(record, good) or _comparable(record, others)
    if compared is None:
        return QualityLevel.FULL
    own, reference = compared
    return next_level(record.level, own, reference)


def _comparable(record: QualityRecord, others: Sequence[QualityRecord]) -> tuple[tuple[float, float], float] | None:
    """Return the confidence interval of the share of faulty answers, and a reference share.

    The reference is the upper bound of the share of faulty answers in `others`, for the same mix of workloads. Return
    None if there are too few answers.
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
    """Return the 99 % Wilson confidence interval for a `share` of `count` answers."""
    square = Z_99**2 / count
    centre, spread = share + square / 2, sqrt(square * share * (1 - share) + square**2 / 4)
    return max((centre - spread) / (1 + square), 0.0), min((centre + spread) / (1 + square), 1.0)


def next_level(level: QualityLevel, own: tuple[float, float], reference: float) -> QualityLevel:
    """Return the level after a comparison.

    `own` is the confidence interval of the deployment's share of faulty answers, and `reference` the share of the
    others. The level falls if the lower bound of `own` exceeds a limit, and rises if the upper bound is below it.
    """
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

    `answers` is the number of answers; old answers count for less than 1. `faulty_per_thousand` is the number of faulty
    answers per thousand, and `faults` the number per thousand for each kind of fault. An answer may have several
    faults. `weight` is the part (0.25 to 1) of its configured weight that the deployment gets.
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


# Callback that receives the name of a deployment, the faults of its answer, and the workload of the request.
RecordAnswer = Callable[[str, Collection[AnswerFault], int], None]


class QualityObserver(Observer):
    """Observer that attributes the faults of answers to deployments."""

    def __init__(self, record: RecordAnswer) -> None:
        self._record = record

    def generation_started(self, began: GenerationStarted) -> None:
        """Do nothing, because an answer is counted when it has ended."""

    def ended(self, done: GenerationDone) -> None:
        for deployment, faults in faults_by_deployment(done).items():
            self._record(deployment, faults, done.start.workload)
