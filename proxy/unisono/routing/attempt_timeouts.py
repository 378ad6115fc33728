"""Time limits of one attempt on a deployment, learned from its recent attempts.

Pure: times are arguments, in seconds of one monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from math import ceil, inf
from typing import Final

from unisono.core.frozen import dataclass
from unisono.core.generation import Timeouts

# Minimum wait in seconds before a probe. If the limit for the first token is shorter, a probe could not finish before
# it.
MIN_WAIT_S: Final = 1.0


@dataclass(eq=False, slots=True)
class FirstTokenWait:
    """Attempt that waits for its first token, and triggers a probe at the time `probe_at`.

    `unread_tokens` is the number of prompt tokens of the attempt that are expected not to be cached. `on_failed_probe`
    is called when a probe fails during the wait.
    """

    unread_tokens: int
    probe_at: float
    on_failed_probe: Callable[[], None] | None = None


def probe_due_at(now: float, limit_s: float) -> float:
    """Return the time at which an attempt that begins now triggers a probe.

    `limit_s` is the attempt's time limit for the first token. The probe is due when half of this limit has passed, but
    not before `MIN_WAIT_S`.
    """
    return now + max(limit_s / 2, MIN_WAIT_S)


class GenerationActivity:
    """Counter of the generations that a deployment is sending, and the time of its last output."""

    def __init__(self) -> None:
        self._running = 0
        self._last_at = 0.0

    def start_generation(self, now: float) -> None:
        self._running += 1
        self._last_at = now

    def end(self, now: float) -> None:
        self._running -= 1
        self._last_at = now

    def last_at(self, now: float) -> float:
        """Return the time of the last output; `now` while a generation of this process runs."""
        return now if self._running else self._last_at


class FirstTokenWaits:
    """Attempts on one deployment that wait for their first token.

    `unread_tokens` is the number of prompt tokens that the deployment still has to read for these attempts.
    """

    def __init__(self) -> None:
        self.unread_tokens = 0
        # Callback that receives the time at which a new attempt triggers a probe.
        self.on_probe_at: Callable[[float], None] | None = None
        self._waits: set[FirstTokenWait] = set()

    def __len__(self) -> int:
        return len(self._waits)

    @property
    def next_probe_at(self) -> float:
        """Time of the next due probe; infinity if no attempt waits."""
        return min((wait.probe_at for wait in self._waits), default=inf)

    def add(self, wait: FirstTokenWait) -> None:
        self._waits.add(wait)
        self.unread_tokens += wait.unread_tokens
        if self.on_probe_at is not None:
            self.on_probe_at(wait.probe_at)

    def remove(self, wait: FirstTokenWait) -> None:
        """Remove an attempt that no longer waits; no effect if it was removed before."""
        if wait in self._waits:
            self._waits.remove(wait)
            self.unread_tokens -= wait.unread_tokens

    def postpone_probes(self, until: float) -> None:
        """Request no probe before the time `until`, because a probe begins now."""
        for wait in self._waits:
            wait.probe_at = max(wait.probe_at, until)

    def report_failed_probe(self) -> None:
        for wait in tuple(self._waits):
            if wait.on_failed_probe is not None:
                wait.on_failed_probe()


MAX_SAMPLES: Final = 64
# Maximum age of a sample in seconds. Engines such as Ollama unload a model after five idle minutes.
MAX_SAMPLE_AGE_S: Final = 240.0
# Minimum length in tokens of a prompt from which the reading speed of a deployment is measured.
LONG_PROMPT_TOKENS: Final = 1024

# Tokens per second. No attempt is given up while a deployment that reads at this speed would still be reading.
MIN_READING_SPEED: Final = 500.0
# Tokens per second of a deployment without a measured long prompt: a laptop without a GPU.
ASSUMED_READING_SPEED: Final = 50.0
# Factors by which the 95th percentiles of the samples are multiplied for the limits.
FIRST_TOKEN_FACTOR: Final = 4.0
GAP_FACTOR: Final = 20.0
# Factor by which the configured minimum is multiplied while there is no sample.
COLD_FACTOR: Final = 3.0
# Factor by which the limits are multiplied for an attempt that no other deployment can take over.
LAST_RESORT_FACTOR: Final = 3.0
MAX_DOUBLINGS: Final = 8
MIN_CONNECT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class MinTimeouts:
    """Configured lower bounds of the learned limits, in seconds."""

    first_token_s: float = 10.0
    silence_s: float = 10.0


@dataclass(frozen=True, slots=True)
class PendingAttempt:
    """Attempt before it begins.

    `waiting_tokens` is the number of prompt tokens of other requests that the deployment still has to read.
    `retries_left` is the number of retries on other deployments; 0 if no other deployment can take over.
    """

    prompt_tokens: int
    waiting_tokens: int = 0
    retries_left: int = 0


@dataclass(frozen=True, slots=True)
class LearnedTimes:
    """95th percentiles of recent samples (90th: `..._p90`); 0 or None without samples.

    `is_warm` is True if there is any sample. `timeouts` counts the attempts that timed out since the last sample.
    """

    is_warm: bool = False
    # Seconds to the first token, for short prompts and for prompts whose cached part is unknown.
    first_token_s: float = 0.0
    first_token_p90_s: float = 0.0
    # For long prompts: seconds to the first token, divided by the number of prompt tokens that were not cached.
    s_per_token: float | None = None
    s_per_token_p90: float | None = None
    # Largest time between two tokens of an answer, in seconds.
    gap_s: float | None = None
    timeouts: int = 0


NOTHING_LEARNED: Final = LearnedTimes()


@dataclass(frozen=True, slots=True)
class AttemptSample:
    """Measured times of one attempt that answered.

    `read_tokens` is the number of prompt tokens that were not cached; None if unknown. `largest_gap_s` is the longest
    time between two tokens; None if all tokens arrived at once.
    """

    at: float
    first_token_s: float
    largest_gap_s: float | None = None
    read_tokens: int | None = None


class AttemptTimes:
    """Samples of one deployment: the last MAX_SAMPLES that are not older than MAX_SAMPLE_AGE_S."""

    def __init__(self) -> None:
        # Time of each sample, and its values with the lists that contain them.
        self._samples: deque[tuple[float, list[tuple[list[float], float]]]] = deque()
        # Values of the samples, each list in ascending order: seconds to the first token for short prompts, seconds to
        # the first token per prompt token for long prompts, and largest gaps in seconds.
        self._first: list[float] = []
        self._per_token: list[float] = []
        self._gaps: list[float] = []
        self._timeouts = 0
        self._learned: LearnedTimes | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def record(self, sample: AttemptSample) -> None:
        """Add an attempt that answered; samples must be added in the order of their times."""
        if len(self._samples) == MAX_SAMPLES:
            self._remove_oldest()
        found = self._values_of(sample)
        self._samples.append((sample.at, found))
        for values, value in found:
            insort(values, value)
        self._timeouts = 0
        # The percentiles are computed now, because a client may be waiting when the next attempt begins.
        self._learned = self._learn()

    def record_timeout(self) -> None:
        """Count an attempt that timed out.

        The next attempt gets a longer limit if no other deployment could take over from it.
        """
        self._timeouts += 1
        self._learned = None

    def clear(self) -> None:
        """Discard all samples, because the server may be a new process."""
        for values in (self._samples, self._first, self._per_token, self._gaps):
            values.clear()
        self._timeouts = 0
        self._learned = None

    def learned(self, now: float) -> LearnedTimes:
        samples = self._samples
        while samples and now - samples[0][0] > MAX_SAMPLE_AGE_S:
            self._remove_oldest()
            self._learned = None
        if self._learned is None:
            self._learned = self._learn()
        return self._learned

    def _remove_oldest(self) -> None:
        _, found = self._samples.popleft()
        for values, value in found:
            del values[bisect_left(values, value)]

    def _values_of(self, sample: AttemptSample) -> list[tuple[list[float], float]]:
        """Return the values of a sample, each preceded by the list to which the value belongs."""
        if sample.read_tokens is not None and sample.read_tokens >= LONG_PROMPT_TOKENS:
            found = [(self._per_token, sample.first_token_s / sample.read_tokens)]
        else:
            found = [(self._first, sample.first_token_s)]
        if sample.largest_gap_s is not None:
            found.append((self._gaps, sample.largest_gap_s))
        return found

    def _learn(self) -> LearnedTimes:
        return LearnedTimes(
            is_warm=bool(self._samples),
            first_token_s=_percentile(self._first, 0.95) if self._first else 0.0,
            first_token_p90_s=_percentile(self._first, 0.9) if self._first else 0.0,
            s_per_token=_percentile(self._per_token, 0.95) if self._per_token else None,
            s_per_token_p90=_percentile(self._per_token, 0.9) if self._per_token else None,
            gap_s=_percentile(self._gaps, 0.95) if self._gaps else None,
            timeouts=self._timeouts,
        )


def attempt_timeouts(
    timeouts: Timeouts, minimum: MinTimeouts, attempt: PendingAttempt, learned: LearnedTimes
) -> Timeouts:
    """Return the time limits of one attempt, none longer than the configured `timeouts`.

    `timeouts.total_s` is the time left for the answer.
    """
    tokens = attempt.prompt_tokens + attempt.waiting_tokens
    certain_s, needed_s = _first_token_needs(tokens, learned)
    gap_s = attempt.waiting_tokens / MIN_READING_SPEED + GAP_FACTOR * (learned.gap_s or 0.0)
    first_token_s = _limit(minimum.first_token_s, certain_s, needed_s, timeouts.total_s, attempt, learned)
    # Without samples of gaps, nothing is known about the silence after the first token.
    silent = learned if learned.gap_s is not None else NOTHING_LEARNED
    silence_s = _limit(minimum.silence_s, gap_s, gap_s, timeouts.total_s, attempt, silent)
    connect_s = max(MIN_CONNECT_S, _share_s(timeouts.total_s, attempt)) if attempt.retries_left else inf
    return Timeouts(
        connect_s=min(timeouts.connect_s, connect_s, timeouts.total_s),
        first_token_s=min(timeouts.first_token_s, first_token_s, timeouts.total_s),
        silence_s=min(timeouts.silence_s, silence_s, timeouts.total_s),
        total_s=timeouts.total_s,
    )


def _first_token_needs(tokens: int, learned: LearnedTimes) -> tuple[float, float]:
    """Return two estimates of the seconds until the first token, for `tokens` prompt tokens.

    The first estimate is allowed in full. The second estimate may be longer, because it assumes a reading speed. The
    estimates are equal if the reading speed was measured.
    """
    per_token_s = learned.s_per_token or 0.0
    certain_s = tokens / MIN_READING_SPEED + FIRST_TOKEN_FACTOR * (learned.first_token_s + tokens * per_token_s)
    is_speed_known = learned.is_warm and (learned.s_per_token is not None or tokens < LONG_PROMPT_TOKENS)
    return certain_s, certain_s if is_speed_known else max(certain_s, tokens / ASSUMED_READING_SPEED)


def _limit(
    minimum_s: float,
    certain_s: float,
    needed_s: float,
    time_left_s: float,
    attempt: PendingAttempt,
    learned: LearnedTimes,
) -> float:
    patient_s = max(minimum_s if learned.is_warm else COLD_FACTOR * minimum_s, needed_s)
    if attempt.retries_left:
        # Leave time for the retries, but allow the time that the prompt needs. A guess may use half of the time left.
        guessed_s = min(needed_s, time_left_s / 2)
        return min(patient_s, max(certain_s, guessed_s, _share_s(time_left_s, attempt)))
    # Giving up would fail the request, or send it to the same server again. So wait longer after every timeout.
    if not learned.is_warm:
        return inf
    return float(LAST_RESORT_FACTOR * 2 ** min(learned.timeouts, MAX_DOUBLINGS) * patient_s)


def _share_s(time_left_s: float, attempt: PendingAttempt) -> float:
    return time_left_s / (attempt.retries_left + 1)


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[ceil(share * len(ordered)) - 1]
