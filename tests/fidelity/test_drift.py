"""Detection of drift: states, and simulated fleets."""

from __future__ import annotations

from dataclasses import fields, replace
from math import exp
from random import Random
from typing import Any

import pytest

from unisono.bootstrap.fidelity import model_decides_alone
from unisono.core.deployments import FidelityState, FidelityStatus
from unisono.core.generation import Sampling
from unisono.core.observer import TokenInfluences
from unisono.core.scoring import TokenScore
from unisono.fidelity.drift import AnswerMeasure, DriftDetector, DriftLimits, measure, next_state

HEALTHY, WARNING, QUARANTINED = FidelityState.HEALTHY, FidelityState.WARNING, FidelityState.QUARANTINED
LIMITS = DriftLimits()
# Sampling options with which the model alone decides on the tokens, and others.
FREE_OPTIONS: dict[str, Any] = {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 1}
OTHER_OPTIONS: dict[str, Any] = {
    "temperature": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {5: 1.0},
}
NO_INFLUENCES = TokenInfluences(Sampling(), False, False, False, False, False)


def test_the_model_alone_decides_without_constraints_and_penalties() -> None:
    assert {*FREE_OPTIONS, *OTHER_OPTIONS} == {field.name for field in fields(Sampling)}
    assert model_decides_alone(NO_INFLUENCES)
    assert model_decides_alone(replace(NO_INFLUENCES, sampling=Sampling(**FREE_OPTIONS)))
    for name, value in OTHER_OPTIONS.items():
        assert not model_decides_alone(replace(NO_INFLUENCES, sampling=Sampling(**{name: value}))), name


@pytest.mark.parametrize("name", [field.name for field in fields(TokenInfluences) if field.name != "sampling"])
def test_the_model_does_not_decide_alone_under_a_constraint(name: str) -> None:
    changes: dict[str, Any] = {name: True}
    assert not model_decides_alone(replace(NO_INFLUENCES, **changes))


def detector(limits: DriftLimits = LIMITS) -> DriftDetector:
    return DriftDetector(limits, FidelityStatus("reference"))


def answer(random: Random, *, flips: float, nats: float, implausible: float) -> AnswerMeasure:
    """Return an answer whose tokens differ by these means; some answers differ much more than others."""
    tokens = min(max(int(exp(random.gauss(5.0, 0.9))), 8), 2000)
    # With a variance of e - 1, one answer in forty has seven times the mean.
    strength = exp(random.gauss(-0.5, 1.0))
    return AnswerMeasure(
        compared=tokens,
        disagreeing=_poisson(random, tokens * flips * strength, tokens),
        nats=tokens * nats * strength,
        judged=tokens,
        implausible=_poisson(random, tokens * implausible * strength, tokens),
    )


def _poisson(random: Random, mean: float, most: int) -> int:
    left, count = exp(-mean), 0
    while (left := left / max(random.random(), 1e-300)) < 1 and count < most:
        count += 1
    return count


@pytest.mark.parametrize("answers", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_healthy_fleet_raises_no_alarm(answers: int) -> None:
    """Ten deployments on other engines, whose rounding causes a fifth of each limit."""
    random = Random(26)
    detectors = [detector() for _ in range(10)]
    states = set()
    for _ in range(answers):
        for each in detectors:
            states.add(each.add(answer(random, flips=0.001, nats=0.0004, implausible=0.00006), 0.0).state)
    assert states == {HEALTHY}


@pytest.mark.parametrize(
    ("state", "is_exceeded", "answers", "expected"),
    [
        (HEALTHY, False, 300, (HEALTHY, False)),
        (HEALTHY, True, 300, (WARNING, True)),
        (WARNING, False, 49, (WARNING, False)),
        (WARNING, False, 50, (HEALTHY, False)),
        (WARNING, True, 10, (QUARANTINED, True)),
        (QUARANTINED, True, 10, (QUARANTINED, False)),
        (QUARANTINED, False, 300, (QUARANTINED, False)),
    ],
)
def test_states_follow_from_new_answers(
    state: FidelityState, answers: int, expected: tuple[FidelityState, bool], *, is_exceeded: bool
) -> None:
    assert next_state(state, is_exceeded=is_exceeded, answers=answers) == expected


def feed(drift: DriftDetector, random: Random, *, nats: float, most: int = 200) -> int:
    """Add answers until the state changes, and return how many there were."""
    before = drift.status.state
    for count in range(1, most + 1):
        if drift.add(answer(random, flips=0.001, nats=nats, implausible=0.0), 0.0).state is not before:
            return count
    return most


def test_a_drifting_deployment_is_warned_quarantined_and_admitted_again() -> None:
    random, drift = Random(26), detector()
    feed(drift, random, nats=0.02)
    assert drift.status.state is WARNING
    assert drift.status.exceeded == ("divergence",)
    feed(drift, random, nats=0.02)
    assert (drift.status.state, drift.status.until, drift.status.quarantines) == (QUARANTINED, 900.0, 1)
    assert not drift.release(899.0)
    assert drift.release(900.0)
    assert drift.status.state is WARNING
    # It still drifts, so the next quarantine is longer.
    feed(drift, random, nats=0.02)
    assert (drift.status.state, drift.status.until, drift.status.quarantines) == (QUARANTINED, 1800.0, 2)
    assert drift.release(1800.0)
    assert feed(drift, random, nats=0.0004) == 50
    assert (drift.status.state, drift.status.quarantines) == (HEALTHY, 0)


def test_without_a_quarantine_there_is_only_a_warning() -> None:
    random, drift = Random(26), detector(DriftLimits(quarantine_s=0.0))
    feed(drift, random, nats=0.02)
    assert feed(drift, random, nats=0.02, most=500) == 500
    assert drift.status.state is WARNING


def test_a_few_bad_answers_are_no_drift() -> None:
    random, drift = Random(26), detector()
    for count in range(2_000):
        # One answer in a hundred differs much, as answers at a tie of the router do.
        nats = 0.05 if count % 100 == 7 else 0.0004
        assert drift.add(answer(random, flips=0.001, nats=nats, implausible=0.0), 0.0).state is HEALTHY


def test_measures_of_an_answer() -> None:
    best = TokenScore(5, -0.1, ((5, -0.1), (6, -2.5)))
    other = TokenScore(5, -2.5, ((6, -0.1), (5, -2.5)))
    rare = TokenScore(9, -15.0, ((5, -0.1), (6, -2.5)))
    measured = measure([best, best, rare, None], [best, other, rare, best], is_sampled_freely=True)
    assert (measured.compared, measured.disagreeing, measured.judged, measured.implausible) == (3, 1, 3, 1)
    assert measured.nats > 1
    # A deployment that does not score, and tokens that a constraint forced.
    assert measure([best, rare], (), is_sampled_freely=True) == AnswerMeasure(judged=2, implausible=1)
    assert measure([best, rare], (), is_sampled_freely=False) == AnswerMeasure()
