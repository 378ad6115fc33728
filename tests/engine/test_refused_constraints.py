"""Constraints that a backend fails on: generation without them, and later validation."""

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
from unisono.engine.deps import EngineDeps
from unisono.engine.generation import Engine
from unisono.engine.interventions.refused_constraints import REFUSAL_TTL_S, RefusedConstraints
from unisono.engine.request import GenerationReport, GenerationRequest
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

# -- known refusals

SCHEMA = JsonSchema({"type": "object", "properties": {"city": {"type": "string"}}})
OTHER = JsonSchema({"type": "object"})
FAILED, DISCONNECTED = Symptom.SERVER_ERROR, Symptom.DISCONNECTED


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


REFUSING: dict[str, tuple[Symptom | None, set[tuple[str, str]]]] = {
    "rejected": (None, set()),
    "server error": (FAILED, {("m", "a")}),
    "disconnect": (DISCONNECTED, {("m", "a"), ("m", "b")}),
}


@pytest.mark.parametrize(("symptom", "refusing"), REFUSING.values(), ids=REFUSING)
def test_a_failed_constraint_is_refused_for_the_affected_deployments(
    symptom: Symptom | None, refusing: set[tuple[str, str]]
) -> None:
    known = RefusedConstraints()
    known.record_failure("m", "a", SCHEMA, symptom)
    every = [("m", "a"), ("m", "b"), ("n", "a")]
    assert {deployment for deployment in every if known.refuses(*deployment, SCHEMA)} == refusing
    assert not any(known.refuses(*deployment, constraint) for deployment in every for constraint in (OTHER, AnyJson()))


def test_constraints_are_compared_by_content() -> None:
    known = RefusedConstraints()
    for refused, same, others in [
        (SCHEMA, JsonSchema(dict(SCHEMA.schema)), [OTHER, AnyJson()]),
        (OneOf(("a", "b")), OneOf(("a", "b")), [OneOf(("a",)), OneOf(("a b",)), OneOf(("b", "a"))]),
        (AnyJson(), AnyJson(), [JsonSchema({})]),
    ]:
        known.record_failure("m", "a", refused, FAILED)  # type: ignore[arg-type]
        assert known.refuses("m", "a", same)
        assert not any(known.refuses("m", "a", other) for other in others)


def test_a_refusal_expires_after_an_hour() -> None:
    clock = Clock()
    known = RefusedConstraints(clock)
    known.record_failure("m", "a", SCHEMA, DISCONNECTED)
    clock.now += REFUSAL_TTL_S - 1
    assert known.refuses("m", "b", SCHEMA)
    clock.now += 2
    assert not known.refuses("m", "b", SCHEMA)


def test_server_errors_do_not_refuse_a_constraint_that_worked() -> None:
    known = RefusedConstraints()
    known.record_success("m", "a", SCHEMA)
    for _ in range(3):
        known.record_failure("m", "a", SCHEMA, FAILED)
        assert not known.refuses("m", "a", SCHEMA)


def test_two_disconnects_in_a_row_refuse_a_constraint_that_worked() -> None:
    known = RefusedConstraints()
    known.record_success("m", "a", SCHEMA)
    known.record_failure("m", "a", SCHEMA, DISCONNECTED)
    assert not known.refuses("m", "a", SCHEMA)
    known.record_failure("m", "a", SCHEMA, DISCONNECTED)
    assert known.refuses("m", "a", SCHEMA)


def test_a_disconnect_does_not_refuse_where_the_constraint_worked() -> None:
    known = RefusedConstraints()
    known.record_success("m", "b", SCHEMA)
    known.record_failure("m", "a", SCHEMA, DISCONNECTED)
    assert [known.refuses("m", name, SCHEMA) for name in "abc"] == [True, False, True]


CLEARED: dict[str, tuple[Symptom, BackendError, bool]] = {
    "same server error": (FAILED, BackendError("x", symptom=FAILED), True),
    "rejected request": (DISCONNECTED, BackendRejected("x"), True),
    "overloaded": (FAILED, BackendOverloaded("x", symptom=FAILED), False),
    "no connection after a disconnect": (DISCONNECTED, BackendUnavailable("x", symptom=Symptom.NO_CONNECTION), False),
    "another disconnect": (DISCONNECTED, BackendUnavailable("x", symptom=DISCONNECTED), False),
    "no connection after a server error": (FAILED, BackendUnavailable("x", symptom=Symptom.NO_CONNECTION), False),
}


@pytest.mark.parametrize(("symptom", "error", "cleared"), CLEARED.values(), ids=CLEARED)
def test_a_constraint_is_cleared_if_the_failure_repeats_without_it(
    symptom: Symptom, error: BackendError, cleared: bool
) -> None:
    known = RefusedConstraints()
    known.record_failure("m", "a", SCHEMA, symptom)
    known.record_failure_without("m", "a", SCHEMA, symptom, error)
    assert known.refuses("m", "a", SCHEMA) is not cleared


def test_the_number_of_refusals_is_bounded() -> None:
    known = RefusedConstraints()
    for number in range(5000):
        known.record_failure("m", "a", OneOf((str(number),)), FAILED)
    assert not known.refuses("m", "a", OneOf(("0",)))
    assert known.refuses("m", "a", OneOf(("4999",)))


# -- answers


@dataclass
class Failing(Scripted):
    """Backend that fails on constraints.

    Constrained generations fail with `errors` in order. Later unconstrained ones fail with `always` if set.
    """

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


async def run_request(engine: Engine, request: GenerationRequest) -> tuple[list[Event], GenerationReport]:
    stream = engine.start(request)
    events = [event async for batch in stream for event in batch]
    check_lifecycle(events)
    return events, stream.report


def failing(name: str, outputs: Sequence[str], *errors: BackendError, **more: object) -> Failing:
    steps = [Step(output) for output in outputs]
    return Failing(ENCODING, steps, GUIDED, name=name, errors=list(errors), **more)  # type: ignore[arg-type]


REQUEST = turn(form=CITY_FORM)
UNFIT_ANSWER = T + S + "<|channel|>final<|message|>It rains.<|return|>"
WRONG, RIGHT = '{"town":1}<|return|>', PARIS + "<|return|>"
SERVER_ERROR, DISCONNECT = BackendError("x", symptom=FAILED), BackendError("x", symptom=DISCONNECTED)


@pytest.mark.parametrize("error", [SERVER_ERROR, DISCONNECT], ids=["server error", "disconnect"])
@pytest.mark.parametrize("whole", [False, True], ids=["stream", "whole"])
async def test_an_answer_without_the_failed_constraint_is_validated(error: BackendError, whole: bool) -> None:
    backend = failing("a", [UNFIT_ANSWER, WRONG, RIGHT], error)
    built, line = engine(backend)
    events, report = await run_request(built, replace(REQUEST, answer=replace(REQUEST.answer, whole=whole)))
    assert items_of(events) == (R("Hm."), F(PARIS))
    assert backend.constrained == [JsonSchema(CITY)]
    assert (line.failures, report.failovers, report.unmet) == ([], 0, "")
    assert report.recoveries == ["regenerated-answer"]
    assert report.facts.refused_constraints == [RefusedConstraint("a", error.symptom or "")]
    assert report.notes == [
        "The backend failed on the constraint (json_schema). The output was generated without this constraint and "
        "validated afterwards."
    ]


async def test_a_forced_call_is_generated_without_the_failed_constraint() -> None:
    backend = failing("a", [UNFIT_ANSWER, PARIS + "<|call|>"], SERVER_ERROR)
    built, line = engine(backend)
    events, report = await run_request(built, turn(NAMED))
    assert items_of(events) == (R("Hm."), C("get_weather", PARIS))
    assert line.failures == []
    assert len(report.notes) == 1
    assert WEATHER in ENCODING.decode(backend.jobs[-1].prompt.tokens)


@pytest.mark.parametrize("error", [SERVER_ERROR, DISCONNECT], ids=["server error", "disconnect"])
async def test_the_next_answer_is_generated_without_the_failed_constraint(error: BackendError) -> None:
    backend = failing("a", [UNFIT_ANSWER, RIGHT, UNFIT_ANSWER, RIGHT, UNFIT_ANSWER, RIGHT], error)
    built, _ = engine(backend)
    await run_request(built, REQUEST)
    _, report = await run_request(built, REQUEST)
    assert len(backend.constrained) == 1
    assert report.facts.refused_constraints == [RefusedConstraint("a", "remembered")]
    assert len(report.notes) == 1
    other = AnswerForm("town", {"type": "object", "properties": {"city": {"type": "string"}}}, strict=True)
    _, report = await run_request(built, turn(form=other))
    assert len(backend.constrained) == 2
    assert report.notes == []


async def test_a_backend_that_fails_without_the_constraint_too_fails_over() -> None:
    first = failing("a", [UNFIT_ANSWER], SERVER_ERROR, always=SERVER_ERROR)
    other = failing("b", [RIGHT])
    built, line = engine(first, other)
    events, report = await run_request(built, REQUEST)
    assert items_of(events) == (R("Hm."), F(PARIS))
    assert line.failures == [SERVER_ERROR]
    assert (len(first.constrained), len(other.constrained), report.failovers) == (1, 1, 1)


async def test_a_constraint_that_may_have_crashed_a_server_is_not_sent_on() -> None:
    gone = BackendUnavailable("x", symptom=Symptom.NO_CONNECTION)
    first = failing("a", [UNFIT_ANSWER], DISCONNECT, always=gone)
    other = failing("b", [RIGHT])
    built, line = engine(first, other)
    events, report = await run_request(built, REQUEST)
    assert items_of(events) == (R("Hm."), F(PARIS))
    assert line.failures == [gone]
    assert (len(first.constrained), len(other.constrained)) == (1, 0)
    assert [each.reason for each in report.facts.refused_constraints] == ["disconnected", "remembered"]


async def test_a_failed_connection_does_not_refuse_the_constraint() -> None:
    gone = BackendUnavailable("x")
    first = failing("a", [UNFIT_ANSWER], gone)
    other = failing("b", [RIGHT])
    built, line = engine(first, other)
    _, report = await run_request(built, REQUEST)
    assert (line.failures, len(other.constrained), report.notes) == ([gone], 1, [])
