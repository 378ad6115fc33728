"""Observation of a generation: token pace, trace context, observer calls and failing observers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from unisono.core.answer_times import GAPS_S, Pace
from unisono.core.conversation import Conversation, Preamble
from unisono.core.events import Closed, Event, Finished, Opened, Reasoning
from unisono.core.generation import FinishReason, Usage
from unisono.core.observer import GenerationDone, GenerationOutcome, GenerationStarted
from unisono.core.trace_context import TraceContext
from unisono.engine.request import (
    GenerationReport,
    GenerationRequest,
    GenerationService,
    GenerationStream,
    RequestOrigin,
    Resumption,
)
from unisono.errors import BackendTimeout, UnisonoError
from unisono.harmony.encoding import load_encoding
from unisono.middleware.pipeline import GuardedService
from unisono.middleware.telemetry import GenerationObservation

ITEM = Reasoning(0)
TOKENS = tuple(load_encoding().encode_marked("<|start|>assistant<|channel|>analysis<|message|>Hm, so.<|end|>"))
BODY = len(load_encoding().encode_marked("Hm, so."))
FIRST: list[Event] = [Opened(ITEM)]
LAST: list[Event] = [Closed(ITEM, "Hm, so.", TOKENS), Finished(FinishReason.STOP, Usage(3, 9))]

PACES: dict[str, tuple[list[tuple[int, float]], int, dict[float, int], float]] = {
    "one at a time": ([(1, 0.0), (1, 0.02), (1, 0.04)], 3, {0.02: 2}, 0.04),
    "many tokens in the first read": ([(8, 5.0), (1, 5.5)], 9, {0.5: 1}, 0.5),
    "many tokens in a later read": ([(1, 0.0), (4, 0.4)], 5, {0.1: 4}, 0.4),
    "slower than any bound": ([(1, 0.0), (1, 60.0)], 2, {float("inf"): 1}, 60.0),
    "nothing": ([], 0, {}, 0.0),
}


@pytest.mark.parametrize(("reads", "tokens", "gaps", "total"), PACES.values(), ids=PACES)
def test_tokens_of_one_read_share_its_gap(
    reads: list[tuple[int, float]], tokens: int, gaps: dict[float, int], total: float
) -> None:
    pace = Pace()
    for count, at in reads:
        pace.record(count, at)
    found = {bound: count for bound, count in zip([*GAPS_S, float("inf")], pace.gaps, strict=False) if count}
    assert (pace.tokens, found) == (tokens, gaps)
    assert pace.gaps_s == pytest.approx(total)


def test_a_child_span_has_a_deterministic_id() -> None:
    root = TraceContext("a" * 32, "b" * 16, state="v=1")
    child = root.child("step 0").child("try 0")
    assert child == TraceContext("a" * 32, "b" * 16, state="v=1").child("step 0").child("try 0")
    assert len({child.span_id, root.span_id, root.child("step 0").span_id, root.child("step 1").span_id}) == 4
    assert TraceContext.read(child.parent, child.state) == child


class ScriptedStream(GenerationStream):
    """Stream that yields the given batches and then raises the given error."""

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


class SingleStreamService(GenerationService):
    def __init__(self, stream: ScriptedStream) -> None:
        self.stream = stream

    def start(self, request: GenerationRequest) -> GenerationStream:
        return self.stream

    async def count(self, request: GenerationRequest) -> int:
        return 7


class RecordingObserver:
    def __init__(self, *, fails: bool = False) -> None:
        self.calls: list[Any] = []
        self._fails = fails

    def generation_started(self, began: GenerationStarted) -> None:
        self.ended(began)

    def ended(self, done: Any) -> None:
        self.calls.append(done)
        if self._fails:
            raise KeyError("not mine")


def observed(stream: ScriptedStream, *observers: RecordingObserver) -> GenerationService:
    return GuardedService(SingleStreamService(stream), [GenerationObservation(observers)])


REQUEST = GenerationRequest(
    "gpt-oss", Conversation(Preamble()), origin=RequestOrigin(surface="chat", tenant="a", request_id="req_1")
)


async def test_an_observer_is_called_at_the_start_and_end_of_an_answer() -> None:
    observer = RecordingObserver()
    stream = observed(ScriptedStream([FIRST, LAST], None), observer).start(REQUEST)
    assert observer.calls == []
    assert [batch async for batch in stream] == [FIRST, LAST]
    start, done = observer.calls
    assert isinstance(done, GenerationDone)
    assert (start.request_id, start.surface, start.model, start.tenant) == ("req_1", "chat", "gpt-oss", "a")
    assert (done.outcome, done.finish, done.usage) == (GenerationOutcome.COMPLETED, "stop", Usage(3, 9))
    assert done.channels == {"analysis": BODY}
    assert done.first_s is not None
    assert 0 <= done.first_s <= done.ended_s


async def test_tokens_of_an_earlier_generation_are_not_counted_again() -> None:
    observer = RecordingObserver()
    request = GenerationRequest("gpt-oss", Conversation(Preamble()), resumption=Resumption(journal=(1, 2)))
    stream = observed(ScriptedStream([LAST[:1], LAST[1:]], None), observer).start(request)
    assert len([batch async for batch in stream]) == 2
    assert observer.calls[0].resumed
    assert observer.calls[1].channels == {}


async def test_failures_and_client_disconnects_have_different_outcomes() -> None:
    observer = RecordingObserver()
    stream = observed(ScriptedStream([FIRST], BackendTimeout("late")), observer).start(REQUEST)
    with pytest.raises(BackendTimeout):
        assert [batch async for batch in stream]
    assert (observer.calls[1].outcome, observer.calls[1].error) == (GenerationOutcome.FAILED, "backend_timeout")
    scripted = ScriptedStream([FIRST, LAST], None)
    abandoned = observed(scripted, observer).start(REQUEST)
    async for _ in abandoned:
        break
    await abandoned.aclose()
    assert (observer.calls[3].outcome, observer.calls[3].error) == (GenerationOutcome.LEFT, "")
    assert scripted.closed


async def test_a_failing_observer_does_not_affect_the_stream_or_other_observers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing, other = RecordingObserver(fails=True), RecordingObserver()
    stream = observed(ScriptedStream([FIRST, LAST], None), failing, other).start(REQUEST)
    with caplog.at_level(logging.ERROR, "unisono.middleware.telemetry"):
        assert [batch async for batch in stream] == [FIRST, LAST]
    assert len(failing.calls) == len(other.calls) == 2
    assert caplog.text.count("an observer failed") == 2
