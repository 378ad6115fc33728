"""What is told of a turn: paces, traces, and observers that fail."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from unisono.core.conversation import Conversation, Preamble
from unisono.core.events import Closed, Event, Finished, Opened, Reasoning
from unisono.core.generation import FinishReason, Usage
from unisono.core.observer import GAPS_S, GenerationDone, GenerationOutcome, GenerationStarted, Pace
from unisono.core.trace_context import TraceContext
from unisono.engine.request import GenerationReport, GenerationRequest, GenerationService, GenerationStream
from unisono.errors import BackendTimeout, UnisonoError
from unisono.harmony.encoding import load_encoding
from unisono.middleware.telemetry import ObservedService

ITEM = Reasoning(0)
TOKENS = tuple(load_encoding().encode_marked("<|start|>assistant<|channel|>analysis<|message|>Hm, so.<|end|>"))
BODY = len(load_encoding().encode_marked("Hm, so."))
FIRST: list[Event] = [Opened(ITEM)]
LAST: list[Event] = [Closed(ITEM, "Hm, so.", TOKENS), Finished(FinishReason.STOP, Usage(3, 9))]

PACES: dict[str, tuple[list[tuple[int, float]], int, dict[float, int], float]] = {
    "one at a time": ([(1, 0.0), (1, 0.02), (1, 0.04)], 3, {0.02: 2}, 0.04),
    "the first read brings many": ([(8, 5.0), (1, 5.5)], 9, {0.5: 1}, 0.5),
    "a later one too": ([(1, 0.0), (4, 0.4)], 5, {0.1: 4}, 0.4),
    "slower than any bound": ([(1, 0.0), (1, 60.0)], 2, {float("inf"): 1}, 60.0),
    "nothing": ([], 0, {}, 0.0),
}


@pytest.mark.parametrize(("reads", "tokens", "gaps", "total"), PACES.values(), ids=PACES)
def test_tokens_that_come_together_share_the_time(
    reads: list[tuple[int, float]], tokens: int, gaps: dict[float, int], total: float
) -> None:
    pace = Pace()
    for count, at in reads:
        pace.record(count, at)
    found = {bound: count for bound, count in zip([*GAPS_S, float("inf")], pace.gaps, strict=False) if count}
    assert (pace.tokens, found) == (tokens, gaps)
    assert pace.gaps_s == pytest.approx(total)


def test_a_span_below_has_the_same_id_wherever_it_is_asked_for() -> None:
    turn = TraceContext("a" * 32, "b" * 16, state="v=1")
    below = turn.child("step 0").child("try 0")
    assert below == TraceContext("a" * 32, "b" * 16, state="v=1").child("step 0").child("try 0")
    assert len({below.span_id, turn.span_id, turn.child("step 0").span_id, turn.child("step 1").span_id}) == 4
    assert TraceContext.read(below.parent, below.state) == below


class Scripted(GenerationStream):
    """A run that says what it is given, and then fails with what it is given."""

    def __init__(self, batches: list[list[Event]], error: UnisonoError | None) -> None:
        self.report = GenerationReport()
        self._batches = batches
        self._error = error
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        for batch in self._batches:
            yield batch
        if self._error is not None:
            raise self._error

    async def aclose(self) -> None:
        self.closed = True


class OneTurn(GenerationService):
    def __init__(self, run: Scripted) -> None:
        self.run = run

    def start(self, turn: GenerationRequest) -> GenerationStream:
        return self.run

    async def count(self, turn: GenerationRequest) -> int:
        return 7


class Noting:
    def __init__(self, *, fails: bool = False) -> None:
        self.told: list[Any] = []
        self._fails = fails

    def generation_started(self, began: GenerationStarted) -> None:
        self.ended(began)

    def ended(self, done: Any) -> None:
        self.told.append(done)
        if self._fails:
            raise KeyError("not mine")


TURN = GenerationRequest("gpt-oss", Conversation(Preamble()), surface="chat", tenant="a", request_id="req_1")


async def test_an_answer_is_told_when_it_begins_and_when_it_ended() -> None:
    noting = Noting()
    run = ObservedService(OneTurn(Scripted([FIRST, LAST], None)), [noting]).start(TURN)
    assert noting.told == []
    assert [batch async for batch in run] == [FIRST, LAST]
    began, done = noting.told
    assert isinstance(done, GenerationDone)
    assert (began.request_id, began.surface, began.model, began.tenant) == ("req_1", "chat", "gpt-oss", "a")
    assert (done.outcome, done.finish, done.usage) == (GenerationOutcome.COMPLETED, "stop", Usage(3, 9))
    assert done.channels == {"analysis": BODY}
    assert done.first_s is not None
    assert 0 <= done.first_s <= done.ended_s


async def test_what_an_earlier_run_left_is_not_told_again() -> None:
    noting = Noting()
    turn = GenerationRequest("gpt-oss", Conversation(Preamble()), journal=(1, 2))
    run = ObservedService(OneTurn(Scripted([LAST[:1], LAST[1:]], None)), [noting]).start(turn)
    assert len([batch async for batch in run]) == 2
    assert noting.told[0].resumed
    assert noting.told[1].channels == {}


async def test_failures_and_clients_that_leave_are_told_apart() -> None:
    noting = Noting()
    run = ObservedService(OneTurn(Scripted([FIRST], BackendTimeout("late"))), [noting]).start(TURN)
    with pytest.raises(BackendTimeout):
        assert [batch async for batch in run]
    assert (noting.told[1].outcome, noting.told[1].error) == (GenerationOutcome.FAILED, "backend_timeout")
    scripted = Scripted([FIRST, LAST], None)
    left = ObservedService(OneTurn(scripted), [noting]).start(TURN)
    async for _ in left:
        break
    await left.aclose()
    assert (noting.told[3].outcome, noting.told[3].error) == (GenerationOutcome.LEFT, "")
    assert scripted.closed


async def test_an_observer_that_fails_costs_nobody_anything(caplog: pytest.LogCaptureFixture) -> None:
    failing, other = Noting(fails=True), Noting()
    run = ObservedService(OneTurn(Scripted([FIRST, LAST], None)), [failing, other]).start(TURN)
    with caplog.at_level(logging.ERROR, "unisono.middleware.telemetry"):
        assert [batch async for batch in run] == [FIRST, LAST]
    assert len(failing.told) == len(other.told) == 2
    assert caplog.text.count("an observer failed") == 2
