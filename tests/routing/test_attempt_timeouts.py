"""Time limits of one attempt: values for learned times, and bounds for any history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.generation import Timeouts
from unisono.routing.attempt_timeouts import (
    LONG_PROMPT_TOKENS,
    MAX_SAMPLE_AGE_S,
    MAX_SAMPLES,
    MIN_READING_SPEED,
    AttemptSample,
    AttemptTimes,
    LearnedTimes,
    MinTimeouts,
    PendingAttempt,
    attempt_timeouts,
)

CONFIGURED = Timeouts(connect_s=10.0, first_token_s=300.0, silence_s=120.0, total_s=600.0)
SHORT = replace(CONFIGURED, total_s=6.0)
MINIMUM = MinTimeouts()
CHAT = PendingAttempt(100, retries_left=2)
# Samples: seconds to the first token, largest gap in seconds, tokens read.
FAST = [(0.2, 0.05, 100)] * 5
SLOW = [(80.0, 2.0, 8000)] * 5


def learned_from(samples: Sequence[tuple[float, float | None, int | None]], timeouts: int = 0) -> LearnedTimes:
    times = AttemptTimes()
    for first_token_s, gap_s, read_tokens in samples:
        times.record(AttemptSample(0.0, first_token_s, gap_s, read_tokens))
    for _ in range(timeouts):
        times.record_timeout()
    return times.learned(0.0)


COLD = learned_from([])
WARM = learned_from(FAST)

FIRST_TOKEN: dict[str, tuple[Timeouts, PendingAttempt, LearnedTimes, float]] = {
    "cold": (CONFIGURED, CHAT, COLD, 30.0),
    "cold, long prompt at the default speed": (CONFIGURED, PendingAttempt(8000, retries_left=2), COLD, 160.0),
    "cold, half of the time at most": (CONFIGURED, PendingAttempt(50_000, retries_left=2), COLD, 300.0),
    "cold, prompts waiting to be read": (CONFIGURED, PendingAttempt(1000, 7000, retries_left=2), COLD, 160.0),
    "cold, no retries left": (CONFIGURED, PendingAttempt(100), COLD, 300.0),
    "cold, short total time shared": (SHORT, CHAT, COLD, 2.0),
    "cold, short total time, half for a retry": (SHORT, PendingAttempt(600, retries_left=2), COLD, 3.0),
    "cold, short total time and a longer prompt": (SHORT, PendingAttempt(2000, retries_left=2), COLD, 4.0),
    "short total time, no retries left": (SHORT, PendingAttempt(100), COLD, 6.0),
    "warm": (CONFIGURED, CHAT, WARM, 10.0),
    "warm, short total time shared": (SHORT, CHAT, WARM, 2.0),
    "warm, unknown reading speed": (CONFIGURED, PendingAttempt(8000, retries_left=2), WARM, 160.0),
    "warm, no retries left": (CONFIGURED, PendingAttempt(100), WARM, 30.0),
    "one timeout, no retries left": (CONFIGURED, PendingAttempt(100), learned_from(FAST, 1), 60.0),
    "many timeouts, no retries left": (CONFIGURED, PendingAttempt(100), learned_from(FAST, 99), 300.0),
    "one timeout": (CONFIGURED, CHAT, learned_from(FAST, 1), 10.0),
    "slow first token": (CONFIGURED, CHAT, learned_from([(6.0, 0.05, 100)] * 5), 24.2),
    "slow first token, short total time": (SHORT, CHAT, learned_from([(0.7, 0.05, 100)] * 5), 3.0),
    "slow reading, short prompt": (CONFIGURED, CHAT, learned_from(SLOW), 10.0),
    "slow reading, long prompt": (CONFIGURED, PendingAttempt(4000, retries_left=2), learned_from(SLOW), 168.0),
    "one slow sample among many": (CONFIGURED, CHAT, learned_from([*FAST * 12, (9.0, 0.05, 100)]), 10.0),
}


@pytest.mark.parametrize(("timeouts", "attempt", "learned", "limit_s"), FIRST_TOKEN.values(), ids=FIRST_TOKEN)
def test_limit_for_the_first_token(
    timeouts: Timeouts, attempt: PendingAttempt, learned: LearnedTimes, limit_s: float
) -> None:
    limits = attempt_timeouts(timeouts, MINIMUM, attempt, learned)
    assert limits.first_token_s == pytest.approx(limit_s)
    assert limits.total_s == timeouts.total_s


SILENCE: dict[str, tuple[Timeouts, PendingAttempt, LearnedTimes, float]] = {
    "cold": (CONFIGURED, CHAT, COLD, 30.0),
    "cold, no retries left": (CONFIGURED, PendingAttempt(100), COLD, 120.0),
    "cold, short total time shared": (SHORT, CHAT, COLD, 2.0),
    "warm": (CONFIGURED, CHAT, WARM, 10.0),
    "warm, no retries left": (CONFIGURED, PendingAttempt(100), WARM, 30.0),
    "warm, no gap sample": (CONFIGURED, CHAT, learned_from([(0.2, None, 100)]), 30.0),
    "warm, with gaps": (CONFIGURED, CHAT, learned_from(SLOW), 40.0),
    "warm, with gaps and a short total time": (SHORT, CHAT, learned_from([(0.2, 0.2, 100)]), 4.0),
    "long prompt of its own": (CONFIGURED, PendingAttempt(50_000, retries_left=2), WARM, 10.0),
    "prompts of other requests waiting": (CONFIGURED, PendingAttempt(100, 10_000, retries_left=2), WARM, 21.0),
}


@pytest.mark.parametrize(("timeouts", "attempt", "learned", "limit_s"), SILENCE.values(), ids=SILENCE)
def test_limit_for_silence(timeouts: Timeouts, attempt: PendingAttempt, learned: LearnedTimes, limit_s: float) -> None:
    assert attempt_timeouts(timeouts, MINIMUM, attempt, learned).silence_s == pytest.approx(limit_s)


CONNECT: dict[str, tuple[Timeouts, PendingAttempt, float]] = {
    "configured": (CONFIGURED, CHAT, 10.0),
    "short total time shared": (SHORT, CHAT, 2.0),
    "very short total time": (replace(CONFIGURED, total_s=1.5), CHAT, 1.0),
    "no retries left": (SHORT, PendingAttempt(100), 6.0),
}


@pytest.mark.parametrize(("timeouts", "attempt", "limit_s"), CONNECT.values(), ids=CONNECT)
def test_limit_for_connecting(timeouts: Timeouts, attempt: PendingAttempt, limit_s: float) -> None:
    for learned in (COLD, WARM):
        assert attempt_timeouts(timeouts, MINIMUM, attempt, learned).connect_s == pytest.approx(limit_s)


def test_configured_minimum_applies() -> None:
    limits = attempt_timeouts(CONFIGURED, MinTimeouts(first_token_s=40.0, silence_s=50.0), CHAT, WARM)
    assert (limits.first_token_s, limits.silence_s) == (40.0, 50.0)


def test_an_idle_deployment_becomes_cold() -> None:
    times = AttemptTimes()
    times.record(AttemptSample(0.0, 0.2, 0.05, 100))
    assert times.learned(MAX_SAMPLE_AGE_S).is_warm
    assert times.learned(MAX_SAMPLE_AGE_S + 1) == COLD


def test_a_restarted_deployment_is_cold() -> None:
    times = AttemptTimes()
    times.record(AttemptSample(0.0, 0.2, 0.05, 100))
    times.record_timeout()
    times.clear()
    assert times.learned(0.0) == COLD


def test_an_answer_resets_the_number_of_timeouts() -> None:
    times = AttemptTimes()
    times.record_timeout()
    times.record(AttemptSample(0.0, 0.2, 0.05, 100))
    assert times.learned(0.0).timeouts == 0


SECONDS = st.floats(0, 1000, allow_nan=False)
TOKENS = st.integers(0, 200_000)
SAMPLES = st.tuples(SECONDS, st.none() | SECONDS, st.none() | TOKENS)
# Seconds since the event before, and the event.
EVENTS = st.tuples(st.floats(0, 100, allow_nan=False), SAMPLES | st.sampled_from(["timeout", "clear"]))


@st.composite
def histories(draw: st.DrawFn) -> LearnedTimes:
    """Draw the learned times some time after an arbitrary history."""
    times, now = AttemptTimes(), 0.0
    for pause_s, event in draw(st.lists(EVENTS, max_size=100)):
        now += pause_s
        if event == "timeout":
            times.record_timeout()
        elif event == "clear":
            times.clear()
        else:
            first_token_s, gap_s, read_tokens = event
            times.record(AttemptSample(now, first_token_s, gap_s, read_tokens))  # type: ignore[arg-type]
    return times.learned(now + draw(st.floats(0, 600, allow_nan=False)))


LIMITS = st.floats(0.1, 1000, allow_nan=False)
CONFIGURATIONS = st.builds(Timeouts, LIMITS, LIMITS, LIMITS, LIMITS)
MINIMA = st.builds(MinTimeouts, LIMITS, LIMITS)
ATTEMPTS = st.builds(PendingAttempt, TOKENS, TOKENS, st.integers(0, 9))


@given(histories(), CONFIGURATIONS, MINIMA, ATTEMPTS)
def test_no_limit_is_above_the_configured_one_or_the_time_left(
    learned: LearnedTimes, timeouts: Timeouts, minimum: MinTimeouts, attempt: PendingAttempt
) -> None:
    limits = attempt_timeouts(timeouts, minimum, attempt, learned)
    assert limits.total_s == timeouts.total_s
    for limit_s, configured_s in (
        (limits.connect_s, timeouts.connect_s),
        (limits.first_token_s, timeouts.first_token_s),
        (limits.silence_s, timeouts.silence_s),
    ):
        assert 0.0 < limit_s <= min(configured_s, timeouts.total_s)


@given(histories(), CONFIGURATIONS, MINIMA, ATTEMPTS)
def test_limits_leave_time_to_read_the_prompts(
    learned: LearnedTimes, timeouts: Timeouts, minimum: MinTimeouts, attempt: PendingAttempt
) -> None:
    limits = attempt_timeouts(timeouts, minimum, attempt, learned)
    reading_s = (attempt.prompt_tokens + attempt.waiting_tokens) / MIN_READING_SPEED
    assert limits.first_token_s >= min(reading_s, timeouts.first_token_s, timeouts.total_s)
    waiting_s = attempt.waiting_tokens / MIN_READING_SPEED
    assert limits.silence_s >= min(waiting_s, timeouts.silence_s, timeouts.total_s)


@given(histories(), CONFIGURATIONS, MINIMA, ATTEMPTS, TOKENS)
def test_a_longer_prompt_never_has_shorter_limits(
    learned: LearnedTimes, timeouts: Timeouts, minimum: MinTimeouts, attempt: PendingAttempt, more: int
) -> None:
    longer = replace(attempt, prompt_tokens=attempt.prompt_tokens + more)
    behind_others = replace(attempt, waiting_tokens=attempt.waiting_tokens + more)
    limits = attempt_timeouts(timeouts, minimum, attempt, learned)
    for other in (longer, behind_others):
        others = attempt_timeouts(timeouts, minimum, other, learned)
        assert others.first_token_s >= limits.first_token_s
        assert others.silence_s >= limits.silence_s


@given(histories(), st.floats(1.0, 1000.0), MINIMA, st.integers(0, 9))
def test_a_long_prompt_has_enough_time_for_the_first_token(
    learned: LearnedTimes, total_s: float, minimum: MinTimeouts, retries_left: int
) -> None:
    timeouts = replace(CONFIGURED, total_s=total_s)
    limits = attempt_timeouts(timeouts, minimum, PendingAttempt(60_000, retries_left=retries_left), learned)
    assert limits.first_token_s > 20.0 or limits.first_token_s == total_s


@given(histories(), MINIMA, ATTEMPTS)
def test_a_single_deployment_never_has_shorter_limits(
    learned: LearnedTimes, minimum: MinTimeouts, attempt: PendingAttempt
) -> None:
    limits = attempt_timeouts(CONFIGURED, minimum, attempt, learned)
    alone = attempt_timeouts(CONFIGURED, minimum, replace(attempt, retries_left=0), learned)
    assert alone.first_token_s >= limits.first_token_s
    assert alone.silence_s >= limits.silence_s
    assert alone.connect_s >= limits.connect_s


@given(st.lists(SAMPLES, max_size=300))
def test_only_the_last_samples_are_kept(
    samples: list[tuple[float, float | None, int | None]],
) -> None:
    times = AttemptTimes()
    for first_token_s, gap_s, read_tokens in samples:
        times.record(AttemptSample(0.0, first_token_s, gap_s, read_tokens))
    assert len(times._samples) <= MAX_SAMPLES
    assert times.learned(0.0) == learned_from(samples[-MAX_SAMPLES:])


def test_limits_are_finite_without_configured_timeouts() -> None:
    endless = Timeouts(inf, inf, inf, inf)
    assert attempt_timeouts(endless, MINIMUM, PendingAttempt(100), learned_from(FAST, 10**6)).first_token_s < inf


SAMPLES = st.lists(
    st.builds(
        AttemptSample,
        at=st.floats(0, 2 * MAX_SAMPLE_AGE_S),
        first_token_s=st.sampled_from([0.1, 0.2, 5.0]) | st.floats(0, 100),
        largest_gap_s=st.none() | st.sampled_from([0.1, 0.2]),
        read_tokens=st.none() | st.integers(0, 2 * LONG_PROMPT_TOKENS),
    ),
    max_size=2 * MAX_SAMPLES,
)


@given(samples=SAMPLES)
def test_percentiles_are_those_of_the_samples_in_use(samples: list[AttemptSample]) -> None:
    times = AttemptTimes()
    samples.sort(key=lambda sample: sample.at)
    for sample in samples:
        times.record(sample)
    now = samples[-1].at if samples else 0.0
    used = [sample for sample in samples[-MAX_SAMPLES:] if now - sample.at <= MAX_SAMPLE_AGE_S]
    long = [one for one in used if one.read_tokens is not None and one.read_tokens >= LONG_PROMPT_TOKENS]
    learned = times.learned(now)
    assert learned.is_warm == bool(used)
    first_s = [one.first_token_s for one in used if one not in long]
    assert learned.first_token_s == (percentile(first_s, 95) or 0.0)
    assert learned.first_token_p90_s == (percentile(first_s, 90) or 0.0)
    per_token_s = [one.first_token_s / (one.read_tokens or 1) for one in long]
    assert learned.s_per_token == percentile(per_token_s, 95)
    assert learned.s_per_token_p90 == percentile(per_token_s, 90)
    assert learned.gap_s == percentile([one.largest_gap_s for one in used if one.largest_gap_s is not None], 95)
    times.clear()
    assert times.learned(now) == LearnedTimes()


def percentile(values: list[float], percent: int) -> float | None:
    return sorted(values)[ceil(percent / 100 * len(values)) - 1] if values else None
