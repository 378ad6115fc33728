"""Gates around a generation: the order of their calls, and every way in which a generation ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import pytest

from unisono.api.n_choices import MergedStreams, collect_all
from unisono.core.conversation import Conversation, Preamble
from unisono.core.events import Event, Finished, Opened, Reasoning
from unisono.core.generation import FinishReason, Usage
from unisono.engine.request import (
    BatchSink,
    GenerationReport,
    GenerationRequest,
    GenerationService,
    GenerationStream,
    RequestOrigin,
)
from unisono.errors import LimitReached, ShuttingDown, UnisonoError
from unisono.middleware.open_requests import OPEN, OpenRequest
from unisono.middleware.pipeline import Gate, GuardedService

REQUEST = GenerationRequest("gpt-oss", Conversation(Preamble()), origin=RequestOrigin(recoveries=("media-left-out",)))
FIRST: list[Event] = [Opened(Reasoning(0))]
LAST: list[Event] = [Finished(FinishReason.STOP, Usage(3, 9))]
REFUSAL = LimitReached("too many requests")


@dataclass
class Script(GenerationService):
    """Service whose stream yields batches, then waits for ever or raises."""

    batches: Sequence[list[Event]] = (FIRST, LAST)
    error: UnisonoError | None = None
    hangs: bool = False
    requests: list[GenerationRequest] = field(default_factory=list)
    closed: int = 0
    # The sink of each stream when its iteration began.
    sinks: list[BatchSink | None] = field(default_factory=list)

    def start(self, request: GenerationRequest) -> GenerationStream:
        self.requests.append(request)
        return ScriptedStream(self)

    async def count(self, request: GenerationRequest) -> int:
        return 7


class ScriptedStream(GenerationStream):
    def __init__(self, script: Script) -> None:
        self.report = GenerationReport()
        self._script = script
        self._batches: AsyncGenerator[list[Event]] | None = None

    def __aiter__(self) -> AsyncIterator[list[Event]]:
        self._batches = self._each()
        return self._batches

    async def _each(self) -> AsyncGenerator[list[Event]]:
        self._script.sinks.append(self.sink)
        for batch in self._script.batches:
            yield batch
        if self._script.hangs:
            await asyncio.Event().wait()
        if self._script.error is not None:
            raise self._script.error

    async def aclose(self) -> None:
        self._script.closed += 1
        if self._batches is not None:
            await self._batches.aclose()


@dataclass
class Recorded(Gate):
    """Gate that lists its calls."""

    name: str
    calls: list[str]
    refuses: str = ""

    async def admit(self, request: GenerationRequest) -> GenerationRequest:
        self.calls.append(f"{self.name}.admit")
        if self.refuses == "admit":
            raise REFUSAL
        return replace(request, origin=replace(request.origin, request_id=request.origin.request_id + self.name))

    def start(self) -> None:
        self.calls.append(f"{self.name}.start")

    def observe(self, batch: Sequence[Event]) -> None:
        self.calls.append(f"{self.name}.observe")

    async def finish(self, finished: Finished) -> None:
        self.calls.append(f"{self.name}.finish")
        if self.refuses == "finish":
            raise REFUSAL

    def end(self, error: BaseException | None) -> None:
        self.calls.append(f"{self.name}.end {type(error).__name__}")

    def release(self) -> None:
        self.calls.append(f"{self.name}.release")


def guarded(script: Script, calls: list[str], *, refuses: str = "") -> GenerationStream:
    """Return a stream behind the gates `a` and `b`, of which the inner one refuses a call."""
    gates = [lambda _: Recorded("a", calls), lambda _: None, lambda _: Recorded("b", calls, refuses)]
    return GuardedService(script, gates, can_drain=True).start(REQUEST)


BEGIN = ["a.start", "b.start", "a.admit", "b.admit"]
ONE = ["b.observe", "a.observe"]
END = ["b.observe", "b.finish", "a.observe", "a.finish"]

WAYS: dict[str, tuple[Script, str, list[str], type[Exception] | None]] = {
    "complete": (Script(), "", [*BEGIN, *ONE, *END, "b.end NoneType", "a.end NoneType"], None),
    "refused": (Script(), "admit", [*BEGIN, "b.end LimitReached", "a.end LimitReached"], LimitReached),
    "end refused": (
        Script(),
        "finish",
        [*BEGIN, *ONE, *END[:2], "b.end LimitReached", "a.end LimitReached"],
        LimitReached,
    ),
    "failed": (
        Script([FIRST], error=UnisonoError("broken")),
        "",
        [*BEGIN, *ONE, "b.end UnisonoError", "a.end UnisonoError"],
        UnisonoError,
    ),
}


@pytest.mark.parametrize(("script", "refuses", "expected", "error"), WAYS.values(), ids=WAYS)
async def test_gates_are_called_in_order(
    script: Script, refuses: str, expected: list[str], error: type[Exception] | None
) -> None:
    calls: list[str] = []
    stream = guarded(script, calls, refuses=refuses)
    with nullcontext() if error is None else pytest.raises(error):
        assert [batch async for batch in stream] == [FIRST, LAST]
    assert calls == expected
    assert [request.origin.request_id for request in script.requests] == ([] if refuses == "admit" else ["ab"])
    await stream.aclose()
    assert calls == expected


async def test_a_stream_is_admitted_once_before_its_iteration() -> None:
    calls: list[str] = []
    stream = guarded(Script(), calls)
    await stream.admit()
    await stream.admit()
    assert calls == ["a.admit", "b.admit"]
    assert [batch async for batch in stream] == [FIRST, LAST]
    assert calls[2:4] == ["a.start", "b.start"]
    assert calls.count("a.admit") == 1


async def test_a_stream_that_is_never_iterated_is_released() -> None:
    script, calls = Script(), list[str]()
    stream = guarded(script, calls)
    await stream.admit()
    await stream.aclose()
    assert calls == ["a.admit", "b.admit", "b.release", "a.release"]
    assert script.closed == 1


class Filtering(Gate):
    """Gate that holds no events, but could."""

    async def filter(self, batch: list[Event]) -> list[Event]:
        return batch


@pytest.mark.parametrize("has_filter", [False, True])
async def test_the_sink_of_the_consumer_takes_deltas_unless_a_gate_filters_them(has_filter: bool) -> None:
    script = Script()
    gates = [lambda _: Filtering() if has_filter else Recorded("a", [])]
    stream = GuardedService(script, gates).start(REQUEST)
    stream.sink = lambda _: True
    assert [batch async for batch in stream] == [FIRST, LAST]
    assert script.sinks == [None if has_filter else stream.sink]


async def test_a_refused_admission_ends_the_gates() -> None:
    calls: list[str] = []
    stream = guarded(Script(), calls, refuses="admit")
    with pytest.raises(LimitReached):
        await stream.admit()
    assert calls == ["a.admit", "b.admit", "b.end LimitReached", "a.end LimitReached"]


async def test_the_report_begins_with_the_recoveries_of_the_request() -> None:
    script = Script()
    stream = guarded(script, [])
    assert [batch async for batch in stream]
    assert stream.report.recoveries == ["media-left-out"]


async def test_a_client_that_leaves_ends_the_gates() -> None:
    script, calls = Script(), list[str]()
    stream = guarded(script, calls)
    async for _ in stream:
        break
    await stream.aclose()
    assert calls[-2:] == ["b.end GeneratorExit", "a.end GeneratorExit"]
    assert script.closed


@pytest.mark.parametrize("waits", [True, False], ids=["while it waits", "between two batches"])
async def test_the_shutdown_of_the_gateway_ends_a_stream(waits: bool) -> None:
    calls: list[str] = []
    task = asyncio.current_task()
    assert task is not None
    request = OpenRequest(task)
    token = OPEN.set(request)
    try:
        batches = aiter(guarded(Script([FIRST], hangs=True), calls))
        assert await anext(batches) == FIRST
        if waits:
            asyncio.get_running_loop().call_soon(request.fail_streams)
        else:
            request.fail_streams()
        with pytest.raises(ShuttingDown):
            await anext(batches)
    finally:
        OPEN.reset(token)
    assert (task.cancelling(), request.streams) == (0, set())
    assert calls[-2:] == ["b.end ShuttingDown", "a.end ShuttingDown"]


class LateRefusal(Gate):
    """Gate that refuses its generation while others run."""

    async def admit(self, request: GenerationRequest) -> GenerationRequest:
        await asyncio.sleep(0.05)
        raise REFUSAL


async def collected(streams: Sequence[GenerationStream]) -> None:
    await collect_all(streams)


async def read_merged(streams: Sequence[GenerationStream]) -> None:
    merged = MergedStreams(streams)
    try:
        async for _ in merged:
            pass
    finally:
        await merged.aclose()


def three_choices(calls: list[str], third: Gate | None) -> list[GenerationStream]:
    """Return a complete choice, one that never ends, and one behind the gate `third`."""
    scripts = {"whole": Script(), "endless": Script([FIRST], hangs=True), "third": Script([FIRST], hangs=True)}
    streams = []
    for name, script in scripts.items():
        gates = [lambda _, name=name: Recorded(name, calls), lambda _, name=name: third if name == "third" else None]
        streams.append(GuardedService(script, gates).start(REQUEST))
    return streams


@pytest.mark.parametrize("read", [collected, read_merged])
async def test_a_failed_choice_ends_the_others_with_its_error(
    read: Callable[[Sequence[GenerationStream]], Awaitable[None]],
) -> None:
    calls: list[str] = []
    with pytest.raises(LimitReached):
        await asyncio.wait_for(read(three_choices(calls, LateRefusal())), 2)
    ends = [call for call in calls if ".end " in call]
    assert sorted(ends) == ["endless.end LimitReached", "third.end LimitReached", "whole.end NoneType"]


@pytest.mark.parametrize("read", [collected, read_merged])
async def test_a_client_that_leaves_ends_all_choices(
    read: Callable[[Sequence[GenerationStream]], Awaitable[None]],
) -> None:
    calls: list[str] = []
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read(three_choices(calls, None)), 0.05)
    ends = [call for call in calls if ".end " in call]
    assert sorted(ends) == ["endless.end CancelledError", "third.end CancelledError", "whole.end NoneType"]
