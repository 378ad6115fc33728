"""Quality of deployments: levels, comparable requests, and simulated fleets."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from tests.routing.doubles import Clock, known_pool
from unisono.core.answer_faults import FAULT_OF_RULE, HARMLESS_RULES, NO_FAULTS, AnswerFault, faults_by_deployment
from unisono.core.observer import GenerationDone, GenerationOutcome, GenerationStarted, StepDone
from unisono.core.recovery_rules import RULES
from unisono.errors import BackendProtocolError, BackendUnavailable
from unisono.routing.deployment_choice import Candidate, SelectionRequest, choose
from unisono.routing.group import RoutingRules
from unisono.routing.quality import HALVING_S, QualityLevel, QualityRecord, next_level, quality_of

QUARTER, HALF, FULL = QualityLevel.QUARTER, QualityLevel.HALF, QualityLevel.FULL
FAULT = frozenset({AnswerFault.RECOVERY})
STARTED = GenerationStarted("req_1", "", "", "chat", "gpt-oss", background=False, at=0.0)


def done(*steps: StepDone, outcome: GenerationOutcome = GenerationOutcome.COMPLETED, **facts: object) -> GenerationDone:
    return GenerationDone(STARTED, 1.0, outcome, steps=steps, **facts)  # type: ignore[arg-type]


def step(name: str, failure: str = "", first_s: float | None = 0.1, generated: int = 5) -> StepDone:
    return StepDone(0, name, 0.0, first_s, 1.0, 10, None, generated, failure=failure)


def test_every_recovery_rule_is_a_fault_or_harmless() -> None:
    assert FAULT_OF_RULE.keys() | HARMLESS_RULES == RULES.keys()
    assert not FAULT_OF_RULE.keys() & HARMLESS_RULES


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (done(step("a")), {"a": set()}),
        (done(step("a"), recoveries=["missing-end", "restored-stop"]), {"a": {AnswerFault.RECOVERY}}),
        (done(step("a"), recoveries=["undeclared-tool"]), {"a": {AnswerFault.UNDECLARED_TOOL}}),
        (done(step("a"), recoveries=["regenerated-call"]), {"a": {AnswerFault.INVALID_CALL}}),
        (done(step("a"), unmet="schema"), {"a": {AnswerFault.UNMET_FORMAT}}),
        # The client's own limit cut the answer off.
        (done(step("a"), unmet="schema", finish="length", recoveries=["unfinished-call"]), {"a": set()}),
        # The deployment that failed is at fault; which one caused the recovery is unknown.
        (
            done(step("a", BackendProtocolError.code), step("b"), recoveries=["missing-end"]),
            {"a": {AnswerFault.CUT_STREAM}},
        ),
        (done(step("a", BackendUnavailable.code, None, 0), step("b")), {"b": set()}),
        (done(step("a"), outcome=GenerationOutcome.LEFT, recoveries=["missing-end"]), {}),
    ],
)
def test_faults_are_attributed_to_deployments(answer: GenerationDone, expected: dict[str, set[AnswerFault]]) -> None:
    assert faults_by_deployment(answer) == expected


@pytest.mark.parametrize(
    ("level", "own", "reference", "expected"),
    [
        (FULL, (0.05, 0.08), 0.02, HALF),
        (FULL, (0.09, 0.12), 0.02, QUARTER),
        (HALF, (0.09, 0.12), 0.02, QUARTER),
        # Between the limits, the level stays.
        (FULL, (0.03, 0.06), 0.02, FULL),
        (HALF, (0.03, 0.06), 0.02, HALF),
        (QUARTER, (0.07, 0.09), 0.02, QUARTER),
        (QUARTER, (0.05, 0.07), 0.02, HALF),
        (QUARTER, (0.00, 0.03), 0.02, FULL),
        # Small shares have no effect, however different they are.
        (FULL, (0.006, 0.009), 0.0001, FULL),
        # If all answers of the others are faulty, nothing is worse.
        (FULL, (0.95, 1.0), 0.9, FULL),
    ],
)
def test_a_level_falls_by_the_lower_bound_and_rises_by_the_upper_one(
    level: QualityLevel, own: tuple[float, float], reference: float, expected: QualityLevel
) -> None:
    assert next_level(level, own, reference) is expected


class Fleet:
    """Simulated group that selects deployments by the gateway's policy."""

    def __init__(self, count: int, seed: int) -> None:
        self.records = [QualityRecord() for _ in range(count)]
        self.candidates = [Candidate(f"vllm-{n}", bit=1 << n, weight=4) for n in range(count)]
        self.random = Random(seed)
        self.changes: list[tuple[int, QualityLevel]] = []
        self._turn = 0
        self.now = 0.0

    def answer(self, at: int, fault_share: float, workload: int = 1) -> None:
        record = self.records[at]
        faults = FAULT if self.random.random() < fault_share else NO_FAULTS
        if record.record(faults, workload, self.now):
            others = [other for other in self.records if other is not record]
            if record.compare(others):
                self.changes.append((at, record.level))
                self.candidates[at].weight = record.level

    def run(self, answers: int, fault_shares: Sequence[float]) -> list[int]:
        """Generate answers, and return how many each deployment gave."""
        counts = [0] * len(self.records)
        for _ in range(answers):
            candidate = choose(self.candidates, SelectionRequest(), self._turn).candidate
            assert candidate is not None
            self._turn += 1
            at = self.candidates.index(candidate)
            counts[at] += 1
            self.answer(at, fault_shares[at])
        return counts


@pytest.mark.parametrize("seed", range(2))
def test_a_faulty_deployment_gets_less_work_until_it_is_repaired(seed: int) -> None:
    fleet = Fleet(3, seed)
    fleet.run(3_000, [0.005, 0.15, 0.005])
    assert [record.level for record in fleet.records] == [FULL, QUARTER, FULL]
    # It still gets its part: a ninth of the requests.
    assert fleet.run(900, [0.005, 0.15, 0.005]) == [400, 100, 400]
    for _ in range(6_000):
        for at in range(3):
            fleet.answer(at, 0.005)
    assert [record.level for record in fleet.records] == [FULL, FULL, FULL]
    assert {at for at, _ in fleet.changes} == {1}
    # Down once and up once, without flapping.
    assert len(fleet.changes) <= 4


@pytest.mark.parametrize("share", [0.0, 0.002, 0.02, 0.2])
def test_a_healthy_fleet_keeps_its_weights(share: float) -> None:
    fleet = Fleet(10, 7)
    fleet.run(8_000, [share] * 10)
    assert fleet.changes == []


def test_faults_of_a_client_have_no_effect() -> None:
    fleet = Fleet(3, 7)
    for _ in range(3_000):
        for at in range(3):
            fleet.answer(at, 0.005)
        # No model meets the schema of this client, and all its requests go to the deployment with its prompt.
        fleet.answer(0, 1.0, workload=2)
    assert fleet.changes == []
    # Even if all answers of all deployments are faulty, none is worse than the others.
    for _ in range(3_000):
        for at in range(3):
            fleet.answer(at, 1.0, workload=3)
    assert fleet.changes == []


def test_few_answers_have_no_effect() -> None:
    fleet = Fleet(2, 7)
    for _ in range(40):
        fleet.answer(0, 1.0)
        fleet.answer(1, 0.0)
    assert fleet.changes == []


def test_several_bad_deployments_are_found() -> None:
    fleet = Fleet(5, 7)
    fleet.run(8_000, [0.01, 0.5, 0.01, 0.08, 0.01])
    levels = [record.level for record in fleet.records]
    assert levels[1] is QUARTER
    assert levels[3] in (HALF, QUARTER)
    assert levels[0] is levels[2] is levels[4] is FULL


def test_old_answers_are_forgotten() -> None:
    fleet = Fleet(2, 7)
    fleet.run(400, [1.0, 0.0])
    assert fleet.records[0].level is QUARTER
    fleet.now += 9 * HALVING_S
    fleet.run(40, [0.0, 0.0])
    assert fleet.records[0].level is FULL
    assert quality_of(fleet.records[0], is_weighted=True).answers < 40


@pytest.mark.parametrize(("is_by_quality", "weights"), [(True, [4, 1]), (False, [1, 1])])
async def test_only_one_strategy_uses_the_levels(*, is_by_quality: bool, weights: list[float]) -> None:
    pool, lives = await known_pool("a", "b", clock=Clock(), rules=RoutingRules(is_by_quality=is_by_quality))
    for _ in range(60):
        pool.record_answer("a", NO_FAULTS, 1)
        pool.record_answer("b", FAULT, 1)
    pool.record_answer("removed", FAULT, 1)
    assert [live.candidate.weight for live in lives] == weights
    assert [status.quality.weight for status in pool.status()] == [weight / weights[0] for weight in weights]


@pytest.mark.parametrize("is_weighted", [True, False])
def test_the_status_has_shares_per_thousand(*, is_weighted: bool) -> None:
    record = QualityRecord()
    for faults in (FAULT, *[NO_FAULTS] * 9):
        record.record(faults, 1, 0.0)
    record.level = HALF
    quality = quality_of(record, is_weighted=is_weighted)
    assert (quality.answers, quality.faulty_per_thousand, quality.faults) == (10, 100.0, {"recovery": 100.0})
    assert quality.weight == (0.5 if is_weighted else 1.0)
