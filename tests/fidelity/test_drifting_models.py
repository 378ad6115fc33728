"""Twenty faults of a scripted model, and the number of answers after which the detector sees each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from tests.fakes.language_model import (
    ANSWER_TOKENS,
    HEADER,
    REASONING_TOKENS,
    Distribution,
    Fault,
    LanguageModel,
    healthy,
)
from tests.fidelity import independent_faults
from unisono.core.deployments import FidelityState, FidelityStatus
from unisono.core.generation import END, RETURN
from unisono.core.scoring import TokenScore
from unisono.fidelity.drift import DriftDetector, DriftLimits, measure

REFERENCE = LanguageModel()
MAX_ANSWERS = 100
RARE_ANSWERS = 250


def draw(prompt: Sequence[int], position: int) -> Random:
    """Return random numbers that are the same for each score of a token."""
    return Random(f"{prompt[0]} {position}")


def rounded(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    noise = draw(prompt, position)
    return {token: value + noise.gauss(0, 0.01) for token, value in found.items()}


def one_token_in_500(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    return {7: -0.01} | {t: v - 5 for t, v in found.items()} if draw(prompt, position).random() < 1 / 500 else found


def dropped_header(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    return found if position else {HEADER[2]: -0.01} | {t: v - 5 for t, v in found.items() if t != HEADER[2]}


def ignored_effort(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    return found if position != len(HEADER) + 2 else {END: -0.05} | {t: v - 3 for t, v in found.items()}


def sharpened(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    return {token: value * 1.2 for token, value in found.items()}


def flattened(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    return {token: value * 0.8 for token, value in found.items()}


def quantised(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    noise = draw(prompt, position)
    return {token: value + noise.gauss(0, 0.15) for token, value in found.items()}


def stale_cache(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    """Answer one prompt in twenty as if it were another one."""
    return REFERENCE.distribution([prompt[0] + 1], position) if draw(prompt, 0).random() < 1 / 20 else found


def lost_window(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    """Forget the beginning of the prompt late in the answer."""
    return REFERENCE.distribution([1], position) if position > ANSWER_TOKENS - 4 and position < 33 else found


def endless(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    return {token: value for token, value in found.items() if token != RETURN}


def no_reasoning(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    at = len(HEADER)
    return {END: -0.02} | {t: v - 4 for t, v in found.items()} if at <= position < at + REASONING_TOKENS else found


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        one_token_in_500,
        dropped_header,
        ignored_effort,
        sharpened,
        flattened,
        quantised,
        stale_cache,
        lost_window,
        endless,
        no_reasoning,
    )
}


def scores(model: LanguageModel, prompt: Sequence[int], tokens: Sequence[int]) -> list[TokenScore]:
    found = []
    for position, token in enumerate(tokens):
        row = sorted(model.distribution(prompt, position).items(), key=lambda one: -one[1])
        found.append(TokenScore(token, dict(row).get(token, -20.0), tuple(row[:10])))
    return found


def answers_until_warning(
    fault: Fault, change: Callable[[list[int], Random], list[int]] = lambda each, _: each, most: int = MAX_ANSWERS
) -> int | None:
    """Return the number of answers until the warning; None if there is none in `most` answers."""
    model, random = LanguageModel(fault), Random(26)
    drift = DriftDetector(DriftLimits(), FidelityStatus("reference"))
    for count in range(1, most + 1):
        prompt = [count, 200006]
        tokens = change(model.greedy(prompt), random)
        measured = measure(scores(REFERENCE, prompt, tokens), scores(model, prompt, tokens), is_sampled_freely=True)
        if drift.add(measured, 0.0).state is not FidelityState.HEALTHY:
            return count
    return None


@pytest.mark.parametrize("fault", [healthy, rounded])
def test_equal_models_cause_no_warning(fault: Fault) -> None:
    assert answers_until_warning(fault) is None


def test_at_least_eight_of_ten_faults_are_found() -> None:
    counts = {name: answers_until_warning(fault) for name, fault in FAULTS.items()}
    assert sum(count is not None for count in counts.values()) >= 8, counts


def test_faults_whose_author_did_not_know_the_detector_are_found() -> None:
    """Three of them are in less than one answer in ten, or in 3 % of the tokens, so they need more answers."""
    counts = {
        **{name: answers_until_warning(fault, most=RARE_ANSWERS) for name, fault in independent_faults.FAULTS.items()},
        **{
            name: answers_until_warning(healthy, change, most=RARE_ANSWERS)
            for name, change in independent_faults.CHANGES.items()
        },
    }
    # No token of an answer that ends too early is implausible.
    assert [name for name, count in counts.items() if count is None] == ["hidden_stop_string"], counts


def test_a_sampler_that_corrupts_one_token_in_500_is_found() -> None:
    """The scores of this deployment are right; only its answers are not."""

    def corrupt(tokens: list[int], random: Random) -> list[int]:
        return [7 if random.random() < 1 / 500 else token for token in tokens]

    assert answers_until_warning(healthy, corrupt) is not None
