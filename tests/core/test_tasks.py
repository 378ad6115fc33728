"""Cancellation of tasks by their owner, and of the owner while it waits."""

from __future__ import annotations

import asyncio

import pytest

from unisono.core.tasks import cancel_and_wait


async def ends_slowly(may_end: asyncio.Event) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        await may_end.wait()


async def test_cancelling_the_caller_is_effective_while_the_task_ends() -> None:
    may_end = asyncio.Event()
    task = asyncio.create_task(ends_slowly(may_end))
    await asyncio.sleep(0)
    continued = []

    async def close() -> None:
        await cancel_and_wait(task)
        continued.append(True)

    caller = asyncio.create_task(close())
    for _ in range(3):
        await asyncio.sleep(0)
    caller.cancel()
    # The end of the task must not hide the simultaneous cancellation of the caller.
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert continued == []
    assert task.cancelled()


async def test_cancel_and_wait_waits_for_every_task() -> None:
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
