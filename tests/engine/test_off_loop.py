"""Long answers do not block the event loop: portioned reading, and long checks in a thread.

Progress of another task is counted in iterations of the loop, independently of the machine's speed.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

from tests.engine.planning import ENCODING, FINAL, WITHOUT_TOOLS, S, T, turn
from tests.engine.scripted import Runner, Scripted, Step
from tests.threads import Threads
from unisono.core.conversation import AnswerForm, FunctionTool, Json, TextGrammar
from unisono.core.events import Closed
from unisono.core.generation import Chunk, CompletionJob
from unisono.core.ports import Schema
from unisono.engine.request import RawPrompt

LIST: dict[str, Json] = {"type": "array", "items": {"type": "integer"}}
FORM = AnswerForm("numbers", LIST, strict=True)
LONG = json.dumps(list(range(0, 30_000, 7)))
SHORT = "[1, 2, 3]"


@dataclass
class IterationCount:
    count: int = 0


@contextmanager
def counting_iterations() -> Iterator[IterationCount]:
    """Count the loop iterations that another task gets."""
    ticks = IterationCount()

    async def tick() -> None:
        while True:
            ticks.count += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(tick())
    try:
        yield ticks
    finally:
        task.cancel()


@dataclass
class Counted(Scripted):
    """Backend that counts the iterations of another task from its first to its last chunk."""

    ticks: IterationCount | None = None
    iterations: int = 0

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        assert self.ticks is not None
        # Let the other task begin.
        await asyncio.sleep(0)
        before = self.ticks.count
        async for chunk in super().complete(job):
            self.iterations = self.ticks.count - before
            yield chunk


# Chunks of one token need no pauses: the backend's connection waits between them.
@pytest.mark.parametrize("per_chunk", [64, 100_000])
async def test_other_tasks_run_during_large_chunks(per_chunk: int) -> None:
    words = " ".join(map(str, range(10_000)))
    with counting_iterations() as ticks:
        backend = Counted(ENCODING, [Step(f"{FINAL}{words}<|return|>")], per_chunk=per_chunk, ticks=ticks)
        run = Runner(ENCODING, backend).engine.start(turn(conversation=WITHOUT_TOOLS))
        events = [event async for batch in run for event in batch]
    assert [event.text for event in events if isinstance(event, Closed)] == [words]
    tokens = len(ENCODING.encode_text(words))
    assert backend.iterations >= tokens // 512


@pytest.mark.parametrize("per_chunk", [1, 64, 100_000])
async def test_other_tasks_run_during_a_raw_completion(per_chunk: int) -> None:
    words = " ".join(map(str, range(10_000)))
    with counting_iterations() as ticks:
        backend = Counted(ENCODING, [Step(f"{words}<|return|>")], per_chunk=per_chunk, ticks=ticks)
        request = turn(conversation=WITHOUT_TOOLS, raw=RawPrompt(text="Count"), max_tokens=100_000)
        events = [event async for batch in Runner(ENCODING, backend).engine.start(request) for event in batch]
    assert [event.text for event in events if isinstance(event, Closed)] == [words]
    tokens = len(ENCODING.encode_text(words))
    assert backend.iterations >= tokens // 512


@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "whole"])
@pytest.mark.parametrize("per_chunk", [3, 100_000])
@pytest.mark.parametrize("text", [SHORT, LONG], ids=["short", "long"])
async def test_answers_are_checked_in_a_thread(text: str, per_chunk: int, whole: bool) -> None:
    threads: list[int] = []

    def check(schema: Schema, text: str) -> str | None:
        threads.append(threading.get_ident())
        return None

    backend = Scripted(ENCODING, [Step(f"{T}{S}{FINAL}{text}<|return|>")], per_chunk=per_chunk)
    request = turn(conversation=WITHOUT_TOOLS, form=FORM, whole=whole)
    run = Runner(ENCODING, backend).engine_with(check).start(request)
    events = [event async for batch in run for event in batch]
    assert [event.text for event in events if isinstance(event, Closed)][-1] == text
    assert [thread != threading.get_ident() for thread in threads] == [True]


CHECKED_CALLS: dict[str, tuple[FunctionTool, str]] = {
    "a strict tool": (FunctionTool("f", "", LIST, strict=True), "functions.f <|constrain|>json"),
    "a tool with a grammar": (
        FunctionTool("f", "", {"type": "string"}, strict=True, free_text=True, grammar=TextGrammar("lark", "start: x")),
        "functions.f",
    ),
}


@pytest.mark.parametrize("per_chunk", [1, 3, 100_000])
@pytest.mark.parametrize(("tool", "recipient"), CHECKED_CALLS.values(), ids=CHECKED_CALLS)
async def test_calls_are_checked_in_a_thread(tool: FunctionTool, recipient: str, per_chunk: int) -> None:
    threads: list[int] = []

    def check(schema: Schema, text: str) -> str | None:
        threads.append(threading.get_ident())
        return None

    step = Step(f"{T}{S}<|channel|>commentary to={recipient}<|message|>{{}}<|call|>")
    backend = Scripted(ENCODING, [step], per_chunk=per_chunk)
    conversation = replace(WITHOUT_TOOLS, preamble=replace(WITHOUT_TOOLS.preamble, tools=(tool,)))
    run = Runner(ENCODING, backend).engine_with(check).start(turn(conversation=conversation))
    assert [event.text for batch in [b async for b in run] for event in batch if isinstance(event, Closed)][-1] == "{}"
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("per_chunk", [1, 100_000])
async def test_answers_without_checks_need_no_thread(per_chunk: int) -> None:
    threads = Threads()
    asyncio.get_running_loop().set_default_executor(threads)
    backend = Scripted(ENCODING, [Step(f"{T}{S}{FINAL}{SHORT}<|return|>")], per_chunk=per_chunk)
    run = Runner(ENCODING, backend).engine.start(turn(conversation=WITHOUT_TOOLS))
    assert [event.text async for batch in run for event in batch if isinstance(event, Closed)][-1] == SHORT
    assert threads.begun == []


async def test_a_message_that_is_regenerated_unchanged_is_checked_once() -> None:
    texts: list[str] = []

    def check(schema: Schema, text: str) -> str | None:
        texts.append(text)
        return "no"

    backend = Scripted(ENCODING, [Step(f"{T}{S}{FINAL}{{}}<|return|>"), Step("{}<|return|>"), Step("{}<|return|>")])
    run = Runner(ENCODING, backend).engine_with(check).start(turn(conversation=WITHOUT_TOOLS, form=FORM))
    assert [event.text async for batch in run for event in batch if isinstance(event, Closed)][-1] == "{}"
    assert (len(backend.jobs), texts) == (3, ["{}"])


@dataclass
class Blocking:
    """JSON check that blocks until `may_end` is set."""

    loop: asyncio.AbstractEventLoop
    begun: asyncio.Event
    may_end: threading.Event

    def __call__(self, schema: Schema, text: str) -> str | None:
        self.loop.call_soon_threadsafe(self.begun.set)
        self.may_end.wait(10)
        return None


@dataclass
class Cancellable(Scripted):
    """Backend that sets `freed` when its stream is closed."""

    freed: bool = False

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        try:
            async for chunk in super().complete(job):
                yield chunk
        finally:
            self.freed = True


async def test_cancelling_a_check_frees_the_backend_and_keeps_the_report() -> None:
    check = Blocking(asyncio.get_running_loop(), asyncio.Event(), threading.Event())
    # The code fence would be removed and reported after the check.
    backend = Cancellable(ENCODING, [Step(f"{T}{S}{FINAL}```json\n{LONG}\n```<|return|>")])
    runner = Runner(ENCODING, backend)
    run = runner.engine_with(check).start(turn(conversation=WITHOUT_TOOLS, form=FORM))

    async def read() -> None:
        async for _ in run:
            pass

    reading = asyncio.create_task(read())
    async with asyncio.timeout(20):
        await check.begun.wait()
    before = [*run.report.journal], [*run.report.recoveries]
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert backend.freed
    assert runner.pool.slots_in_use == 0
    check.may_end.set()
    # The thread has finished.
    await asyncio.get_running_loop().shutdown_default_executor()
    assert (run.report.journal, run.report.recoveries) == before
