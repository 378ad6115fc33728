"""Constraints that a backend fails on: answers are generated without them and validated, and no other one is harmed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from tests.engine.planning import CITY, CITY_FORM, ENCODING, GUIDED, NAMED, PARIS, WEATHER, S, T, turn
from tests.engine.scripted import Line, Scripted, Step
from tests.harmony.fold import check_lifecycle, items_of
from tests.harmony.recoveries import C, F, R
from unisono.core.conversation import AnswerForm
from unisono.core.events import Event
from unisono.core.generation import AnyJson, Chunk, CompletionJob, Constraint, JsonSchema, OneOf
from unisono.core.observer import RefusedConstraint
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import REFUSAL_TTL_S, EngineDeps, RefusedConstraints
from unisono.engine.request import GenerationReport, GenerationRequest
from unisono.engine.service import Engine
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendRejected,
    BackendUnavailable,
    ConstraintRefused,
    Symptom,
    UnisonoError,
)
from unisono.harmony.render import Renderer
from unisono.schemas import violation

# -- what is remembered

SCHEMA = JsonSchema({"type": "object", "properties": {"city": {"type": "string"}}})
OTHER = JsonSchema({"type": "object"})
FAILED, BROKE = Symptom.SERVER_ERROR, Symptom.DISCONNECTED


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


WHERE: dict[str, tuple[Symptom | None, set[tuple[str, str]]]] = {
    "it was rejected": (None, set()),
    "the backend failed": (FAILED, {("m", "a")}),
    "the connection broke": (BROKE, {("m", "a"), ("m", "b")}),
}


@pytest.mark.parametrize(("symptom", "refusing"), WHERE.values(), ids=WHERE)
def test_where_a_constraint_is_not_sent_again(symptom: Symptom | None, refusing: set[tuple[str, str]]) -> None:
    known = RefusedConstraints()
    known.record_failure("m", "a", SCHEMA, symptom)
    every = [("m", "a"), ("m", "b"), ("n", "a")]
    assert {where for where in every if known.refuses(*where, SCHEMA)} == refusing
    assert not any(known.refuses(*where, constraint) for where in every for constraint in (OTHER, AnyJson()))


def test_it_is_known_by_what_it_says() -> None:
    known = RefusedConstraints()
    for refused, same, others in [
        (SCHEMA, JsonSchema(dict(SCHEMA.schema)), [OTHER, AnyJson()]),
        (OneOf(("a", "b")), OneOf(("a", "b")), [OneOf(("a",)), OneOf(("a b",)), OneOf(("b", "a"))]),
        (AnyJson(), AnyJson(), [JsonSchema({})]),
    ]:
        known.record_failure("m", "a", refused, FAILED)  # type: ignore[arg-type]
        assert known.refuses("m", "a", same)
        assert not any(known.refuses("m", "a", other) for other in others)


def test_it_is_remembered_for_an_hour() -> None:
    clock = Clock()
    known = RefusedConstraints(clock)
    known.record_failure("m", "a", SCHEMA, BROKE)
    clock.now += REFUSAL_TTL_S - 1
    assert known.refuses("m", "b", SCHEMA)
    clock.now += 2
    assert not known.refuses("m", "b", SCHEMA)


def test_what_worked_before_was_not_the_reason_of_a_failure() -> None:
    known = RefusedConstraints()
    known.record_success("m", "a", SCHEMA)
    for _ in range(3):
        known.record_failure("m", "a", SCHEMA, FAILED)
        assert not known.refuses("m", "a", SCHEMA)


def test_what_worked_before_is_given_up_when_the_connection_breaks_twice_in_a_row() -> None:
    known = RefusedConstraints()
    known.record_success("m", "a", SCHEMA)
    known.record_failure("m", "a", SCHEMA, BROKE)
    assert not known.refuses("m", "a", SCHEMA)
    known.record_failure("m", "a", SCHEMA, BROKE)
    assert known.refuses("m", "a", SCHEMA)


def test_where_it_worked_it_is_still_sent_when_another_server_broke_on_it() -> None:
    known = RefusedConstraints()
    known.record_success("m", "b", SCHEMA)
    known.record_failure("m", "a", SCHEMA, BROKE)
    assert [known.refuses("m", name, SCHEMA) for name in "abc"] == [True, False, True]


CLEARED: dict[str, tuple[Symptom, BackendError, bool]] = {
    "it fails without it too": (FAILED, BackendError("x", symptom=FAILED), True),
    "the request is wrong": (BROKE, BackendRejected("x"), True),
    "it is busy now": (FAILED, BackendOverloaded("x", symptom=FAILED), False),
    "it may have died of it": (BROKE, BackendUnavailable("x", symptom=Symptom.NO_CONNECTION), False),
    "it may be dying of it": (BROKE, BackendUnavailable("x", symptom=BROKE), False),
    "it failed, and is gone": (FAILED, BackendUnavailable("x", symptom=Symptom.NO_CONNECTION), False),
}


@pytest.mark.parametrize(("symptom", "error", "cleared"), CLEARED.values(), ids=CLEARED)
def test_a_constraint_is_cleared_when_the_same_happens_without_it(
    symptom: Symptom, error: BackendError, cleared: bool
) -> None:
    known = RefusedConstraints()
    known.record_failure("m", "a", SCHEMA, symptom)
    known.record_failure_without("m", "a", SCHEMA, symptom, error)
    assert known.refuses("m", "a", SCHEMA) is not cleared


def test_it_is_bounded() -> None:
    known = RefusedConstraints()
    for number in range(5000):
        known.record_failure("m", "a", OneOf((str(number),)), FAILED)
    assert not known.refuses("m", "a", OneOf(("0",)))
    assert known.refuses("m", "a", OneOf(("4999",)))


# -- what becomes of an answer


@dataclass
class Failing(Scripted):
    """Fails with these errors, one after the other, on generations under a constraint, and with `always` on any that
    comes behind the first of them."""

    errors: list[BackendError] = field(default_factory=list)
    always: UnisonoError | None = None
    constrained: list[Constraint] = field(default_factory=list)

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        if job.constraint is not None:
            self.constrained.append(job.constraint)
            if self.errors:
                error = self.errors.pop(0)
                raise ConstraintRefused("no", symptom=error.symptom) if error.symptom else error
        elif self.constrained and self.always is not None:
            raise self.always
        async for chunk in super().complete(job):
            yield chunk


def engine(*backends: Scripted) -> tuple[Engine, Line]:
    line = Line(backends)
    built = Engine(
        EngineDeps(
            encoding=ENCODING,
            renderer=Renderer(ENCODING),
            pool=line,
            memory=ConversationCache(),
            new_call_id=lambda: "call_1",
            violation=violation,
        )
    )
    return built, line


async def said(engine: Engine, asked: GenerationRequest) -> tuple[list[Event], GenerationReport]:
    run = engine.start(asked)
    events = [event async for batch in run for event in batch]
    check_lifecycle(events)
    return events, run.report


def failing(name: str, outputs: Sequence[str], *errors: BackendError, **more: object) -> Failing:
    steps = [Step(output) for output in outputs]
    return Failing(ENCODING, steps, GUIDED, name=name, errors=list(errors), **more)  # type: ignore[arg-type]


ASKED = turn(form=CITY_FORM)
BEGINS = T + S + "<|channel|>final<|message|>It rains.<|return|>"
WRONG, RIGHT = '{"town":1}<|return|>', PARIS + "<|return|>"
SERVER_ERROR, DISCONNECT = BackendError("x", symptom=FAILED), BackendError("x", symptom=BROKE)


@pytest.mark.parametrize("error", [SERVER_ERROR, DISCONNECT], ids=["fails", "breaks off"])
@pytest.mark.parametrize("whole", [False, True], ids=["stream", "whole"])
async def test_an_answer_is_generated_without_the_constraint_and_validated(error: BackendError, whole: bool) -> None:
    backend = failing("a", [BEGINS, WRONG, RIGHT], error)
    built, line = engine(backend)
    events, report = await said(built, replace(ASKED, whole=whole))
    assert items_of(events) == (R("Hm."), F(PARIS))
    assert backend.constrained == [JsonSchema(CITY)]
    assert (line.failures, report.failovers, report.unmet) == ([], 0, "")
    assert report.recoveries == ["regenerated-answer"]
    assert report.facts.refused_constraints == [RefusedConstraint("a", error.symptom or "")]
    assert report.notes == [
        "The backend did not generate under the constraint (json_schema). The output was validated afterwards."
    ]


async def test_a_forced_call_is_made_without_the_constraint() -> None:
    backend = failing("a", [BEGINS, PARIS + "<|call|>"], SERVER_ERROR)
    built, line = engine(backend)
    events, report = await said(built, turn(NAMED))
    assert items_of(events) == (R("Hm."), C("get_weather", PARIS))
    assert line.failures == []
    assert len(report.notes) == 1
    assert WEATHER in ENCODING.decode(backend.jobs[-1].prompt.tokens)


@pytest.mark.parametrize("error", [SERVER_ERROR, DISCONNECT], ids=["fails", "breaks off"])
async def test_the_next_answer_is_not_tried_under_it(error: BackendError) -> None:
    backend = failing("a", [BEGINS, RIGHT, BEGINS, RIGHT, BEGINS, RIGHT], error)
    built, _ = engine(backend)
    await said(built, ASKED)
    _, report = await said(built, ASKED)
    assert len(backend.constrained) == 1
    assert report.facts.refused_constraints == [RefusedConstraint("a", "remembered")]
    assert len(report.notes) == 1
    other = AnswerForm("town", {"type": "object", "properties": {"city": {"type": "string"}}}, strict=True)
    _, report = await said(built, turn(form=other))
    assert len(backend.constrained) == 2
    assert report.notes == []


async def test_a_backend_that_fails_without_it_too_fails_and_the_next_one_is_sent_the_constraint() -> None:
    one = failing("a", [BEGINS], SERVER_ERROR, always=SERVER_ERROR)
    other = failing("b", [RIGHT])
    built, line = engine(one, other)
    events, report = await said(built, ASKED)
    assert items_of(events) == (R("Hm."), F(PARIS))
    assert line.failures == [SERVER_ERROR]
    assert (len(one.constrained), len(other.constrained), report.failovers) == (1, 1, 1)


async def test_a_server_that_may_have_died_of_it_does_not_hand_it_on() -> None:
    gone = BackendUnavailable("x", symptom=Symptom.NO_CONNECTION)
    one = failing("a", [BEGINS], DISCONNECT, always=gone)
    other = failing("b", [RIGHT])
    built, line = engine(one, other)
    events, report = await said(built, ASKED)
    assert items_of(events) == (R("Hm."), F(PARIS))
    assert line.failures == [gone]
    assert (len(one.constrained), len(other.constrained)) == (1, 0)
    assert [each.reason for each in report.facts.refused_constraints] == ["disconnected", "remembered"]


async def test_a_connection_that_is_not_made_is_a_failure_like_any_other() -> None:
    gone = BackendUnavailable("x")
    one = failing("a", [BEGINS], gone)
    other = failing("b", [RIGHT])
    built, line = engine(one, other)
    _, report = await said(built, ASKED)
    assert (line.failures, len(other.constrained), report.notes) == ([gone], 1, [])
