"""Tasks that are ended by what started them: one cancellation is never mixed up with another."""

from __future__ import annotations

import asyncio

import pytest

from unisono.core.tasks import cancel_and_wait


async def ends_slowly(may_end: asyncio.Event) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        await may_end.wait()


async def test_a_cancellation_of_the_caller_comes_through_while_the_task_ends() -> None:
    may_end = asyncio.Event()
    task = asyncio.create_task(ends_slowly(may_end))
    await asyncio.sleep(0)
    went_on = []

    async def close() -> None:
        await cancel_and_wait(task)
        went_on.append(True)

    caller = asyncio.create_task(close())
    for _ in range(3):
        await asyncio.sleep(0)
    caller.cancel()
    # The task's own end must not hide that the caller was cancelled at the same moment.
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert went_on == []
    assert task.cancelled() or not task.done()


async def test_it_waits_for_the_end_of_every_task() -> None:
    may_end = asyncio.Event()
    tasks = [asyncio.create_task(ends_slowly(may_end)) for _ in range(2)]
    await asyncio.sleep(0)
    caller = asyncio.create_task(cancel_and_wait(None, *tasks))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not caller.done()
    may_end.set()
    await caller
    assert all(task.cancelled() for task in tasks)
    await cancel_and_wait()
