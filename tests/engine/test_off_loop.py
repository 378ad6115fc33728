"""Work on a long answer leaves the event loop: tokens are read in portions, and what its end costs is done in a thread.

Progress of other tasks is counted in turns of the loop, so that nothing here depends on how fast a machine is.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.engine.planning import ENCODING, FINAL, WITHOUT_TOOLS, S, T, turn
from tests.engine.scripted import Runner, Scripted, Step
from unisono.core.conversation import AnswerForm, Json
from unisono.core.events import Closed
from unisono.core.generation import Chunk, CompletionJob
from unisono.core.ports import Schema
from unisono.engine.request import RawPrompt

LIST: dict[str, Json] = {"type": "array", "items": {"type": "integer"}}
FORM = AnswerForm("numbers", LIST, strict=True)
LONG = json.dumps(list(range(0, 30_000, 7)))
SHORT = "[1, 2, 3]"


@dataclass
class Ticks:
    count: int = 0


@contextmanager
def ticking() -> Iterator[Ticks]:
    """Counts the turns of the loop that another task gets."""
    ticks = Ticks()

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
    """Plays its only step, and counts another task's turns from the first chunk to the last."""

    ticks: Ticks | None = None
    during: int = 0

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        assert self.ticks is not None
        # The other task has begun.
        await asyncio.sleep(0)
        before = self.ticks.count
        async for chunk in super().complete(job):
            self.during = self.ticks.count - before
            yield chunk


@pytest.mark.parametrize("per_chunk", [1, 64, 100_000])
async def test_other_tasks_have_their_turns_however_many_tokens_come_at_once(per_chunk: int) -> None:
    words = " ".join(map(str, range(10_000)))
    with ticking() as ticks:
        backend = Counted(ENCODING, [Step(f"{FINAL}{words}<|return|>")], per_chunk=per_chunk, ticks=ticks)
        run = Runner(ENCODING, backend).engine.start(turn(conversation=WITHOUT_TOOLS))
        events = [event async for batch in run for event in batch]
    assert [event.text for event in events if isinstance(event, Closed)] == [words]
    tokens = len(ENCODING.encode_text(words))
    assert backend.during >= tokens // 512


@pytest.mark.parametrize("per_chunk", [1, 64, 100_000])
async def test_a_raw_completion_leaves_other_tasks_their_turns(per_chunk: int) -> None:
    words = " ".join(map(str, range(10_000)))
    with ticking() as ticks:
        backend = Counted(ENCODING, [Step(f"{words}<|return|>")], per_chunk=per_chunk, ticks=ticks)
        asked = turn(conversation=WITHOUT_TOOLS, raw=RawPrompt(text="Count"), max_tokens=100_000)
        events = [event async for batch in Runner(ENCODING, backend).engine.start(asked) for event in batch]
    assert [event.text for event in events if isinstance(event, Closed)] == [words]
    tokens = len(ENCODING.encode_text(words))
    assert backend.during >= tokens // 512


@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "whole"])
@pytest.mark.parametrize("per_chunk", [3, 100_000])
@pytest.mark.parametrize(("text", "leaves"), [(SHORT, False), (LONG, True)], ids=["short", "long"])
async def test_only_a_long_answer_is_checked_in_a_thread(text: str, leaves: bool, per_chunk: int, whole: bool) -> None:
    threads: list[int] = []

    def check(schema: Schema, text: str) -> str | None:
        threads.append(threading.get_ident())
        return None

    backend = Scripted(ENCODING, [Step(f"{T}{S}{FINAL}{text}<|return|>")], per_chunk=per_chunk)
    asked = turn(conversation=WITHOUT_TOOLS, form=FORM, whole=whole)
    run = Runner(ENCODING, backend).engine_with(check).start(asked)
    events = [event async for batch in run for event in batch]
    assert [event.text for event in events if isinstance(event, Closed)][-1] == text
    assert [thread != threading.get_ident() for thread in threads] == [leaves]


@dataclass
class Blocking:
    """A check that goes on until it is told to end."""

    loop: asyncio.AbstractEventLoop
    begun: asyncio.Event
    may_end: threading.Event

    def __call__(self, schema: Schema, text: str) -> str | None:
        self.loop.call_soon_threadsafe(self.begun.set)
        self.may_end.wait(10)
        return None


@dataclass
class Leavable(Scripted):
    """`freed` once its stream was closed."""

    freed: bool = False

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        try:
            async for chunk in super().complete(job):
                yield chunk
        finally:
            self.freed = True


async def test_a_check_that_is_left_frees_the_backend_at_once_and_changes_no_report() -> None:
    check = Blocking(asyncio.get_running_loop(), asyncio.Event(), threading.Event())
    # Behind the check the fence is removed, which would be reported.
    backend = Leavable(ENCODING, [Step(f"{T}{S}{FINAL}```json\n{LONG}\n```<|return|>")])
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
    assert runner.pool.taken == 0
    check.may_end.set()
    # The thread has done all that it will.
    await asyncio.get_running_loop().shutdown_default_executor()
    assert (run.report.journal, run.report.recoveries) == before
