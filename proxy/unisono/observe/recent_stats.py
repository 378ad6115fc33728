"""Statistics of this process for the last hour, by minute: answers, recoveries, backends.

They are for operators without a time series database. They are held in memory, and cost only a few additions per
answer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import time
from typing import Final

from unisono.core.observer import GenerationDone, GenerationOutcome, GenerationStarted, Observer

MINUTES: Final = 60
MINUTE_S: Final = 60


@dataclass(slots=True)
class Worked:
    """Work of a deployment. `cached` is the number of `prompt` tokens reported as cached."""

    generations: int = 0
    failed: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def add(self, other: Worked) -> None:
        self.generations += other.generations
        self.failed += other.failed
        self.prompt += other.prompt
        self.cached += other.cached
        self.generated += other.generated


@dataclass(slots=True)
class MinuteStats:
    """Answers that ended within one minute, which begins at the Unix time `at`."""

    at: int
    answers: int = 0
    failed: int = 0
    generated: int = 0
    recoveries: Counter[str] = field(default_factory=Counter)
    backends: dict[tuple[str, str], Worked] = field(default_factory=dict)


class RecentStats(Observer):
    """Observer that counts answers per minute. `clock` returns the Unix time in seconds."""

    def __init__(self, clock: Callable[[], float] = time) -> None:
        self._clock = clock
        self._minutes: OrderedDict[int, MinuteStats] = OrderedDict()

    def generation_started(self, began: GenerationStarted) -> None:
        """Do nothing: answers are counted when they have ended."""

    def ended(self, done: GenerationDone) -> None:
        minute = self._now()
        minute.answers += 1
        minute.failed += done.outcome is GenerationOutcome.FAILED
        if done.recoveries or done.repairs:
            minute.recoveries.update({*done.recoveries, *(repair.rule for repair in done.repairs)})
        for step in done.steps:
            minute.generated += step.generated
            of = (done.start.model, step.deployment)
            worked = minute.backends.get(of)
            if worked is None:
                worked = minute.backends[of] = Worked()
            worked.generations += 1
            worked.failed += bool(step.failure)
            worked.prompt += step.prompt_tokens
            worked.cached += step.cached_tokens or 0
            worked.generated += step.generated

    def minutes(self) -> Iterator[MinuteStats]:
        """Yield the minutes of the last hour in which an answer ended, the oldest first."""
        first = self._minute() - (MINUTES - 1) * MINUTE_S
        return (minute for at, minute in self._minutes.items() if at >= first)

    def worked(self) -> dict[tuple[str, str], Worked]:
        """Return the work of the last hour, by pairs of model and deployment name."""
        sums: dict[tuple[str, str], Worked] = {}
        for minute in self.minutes():
            for of, worked in minute.backends.items():
                sums.setdefault(of, Worked()).add(worked)
        return sums

    def _minute(self) -> int:
        return int(self._clock()) // MINUTE_S * MINUTE_S

    def _now(self) -> MinuteStats:
        at = self._minute()
        minute = self._minutes.get(at)
        if minute is None:
            minute = self._minutes[at] = MinuteStats(at)
            while len(self._minutes) > MINUTES:
                self._minutes.popitem(last=False)
        return minute
