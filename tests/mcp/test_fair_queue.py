"""Tests of the fair queue of a server: a common concurrency limit, and owners in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.mcp.arguments import sent
from tests.mcp.conftest import Upstream
from unisono.mcp import McpHost, McpLimits
from unisono.mcp.fair_queue import FairQueue, NoSlot


class CallRecorder:
    """Calls that run until they are ended, and the order in which they got their slots."""

    def __init__(self, line: FairQueue) -> None:
        self.line = line
        self.order: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    def call(self, name: str, *, within_s: float = 5.0) -> asyncio.Task[None]:
        """Start a call; the first letter of its name is the owner."""

        async def run() -> None:
            until = asyncio.get_running_loop().time() + within_s
            async with self.line.slot(name[0], until):
                self.order.append(name)
                await self._ends.setdefault(name, asyncio.Event()).wait()

        return asyncio.create_task(run())

    async def end(self, name: str) -> None:
        self._ends.setdefault(name, asyncio.Event()).set()
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_owners_get_slots_in_turn() -> None:
    recorder = CallRecorder(FairQueue(1, 100))
    tasks = [recorder.call(name) for name in ("a1", "a2", "a3", "a4")]
    await settled()
    tasks += [recorder.call(name) for name in ("b1", "b2", "c1")]
    await settled()
    for name in ("a1", "a2", "b1", "c1", "a3", "b2", "a4"):
        assert recorder.order[-1] == name
        await recorder.end(name)
    await asyncio.gather(*tasks)
    assert recorder.line.users == 0


Cancellation = Callable[[CallRecorder, asyncio.Task[None]], object]


@pytest.mark.parametrize("moment", ["while waiting", "when the slot is granted"])
async def test_slot_of_a_cancelled_call_goes_to_the_next_one(moment: str) -> None:
    recorder = CallRecorder(FairQueue(1, 100))
    tasks = [recorder.call("a1")]
    await settled()
    cancelled, waiting = recorder.call("b1"), recorder.call("c1")
    await settled()
    if moment == "while waiting":
        cancelled.cancel()
        await settled()
        await recorder.end("a1")
    else:
        recorder._ends["a1"].set()
        await asyncio.sleep(0)
        cancelled.cancel()
        await settled()
    assert recorder.order == ["a1", "c1"]
    await recorder.end("c1")
    await asyncio.gather(*tasks, waiting)
    assert cancelled.cancelled()
    # The slot is usable afterwards.
    last = recorder.call("d1")
    await settled()
    assert recorder.order[-1] == "d1"
    await recorder.end("d1")
    await last


async def test_call_is_refused_after_its_deadline_or_if_the_queue_is_full() -> None:
    recorder = CallRecorder(FairQueue(1, 2))
    first = recorder.call("a1")
    await settled()
    waiting = [recorder.call("a2", within_s=0.05), recorder.call("a3")]
    await settled()
    with pytest.raises(NoSlot, match=r"^2 calls of this client are waiting"):
        await recorder.call("a4")
    other = recorder.call("b1")
    with pytest.raises(NoSlot, match="deadline"):
        await waiting[0]
    await recorder.end("a1")
    await recorder.end("b1" if recorder.order[-1] == "b1" else "a3")
    await recorder.end("a3")
    await recorder.end("b1")
    await asyncio.gather(first, waiting[1], other)
    assert sorted(recorder.order) == ["a1", "a3", "b1"]


async def test_a_queue_without_places_refuses_every_call_that_would_wait() -> None:
    recorder = CallRecorder(FairQueue(1, 0))
    first = recorder.call("a1")
    await settled()
    with pytest.raises(NoSlot, match=r"^0 calls of this client are waiting"):
        await recorder.call("b1")
    await recorder.end("a1")
    await first
    last = recorder.call("b2")
    await recorder.end("b2")
    await last
    assert recorder.order == ["a1", "b2"]


async def test_slots_of_a_server_are_shared_by_all_owners(upstream: Upstream) -> None:
    host = McpHost(limits=McpLimits())
    running, maximum = 0, 0

    async def call(owner: str, number: int) -> None:
        nonlocal running, maximum
        # Each conversation of an owner has its own connections, but no slots of its own.
        server = upstream.server("modern", concurrent=2, owner=f"{owner}\0talk {number}")
        outcome = await host.call(server, "slow", sent({"seconds": 0.2, "name": f"shared {owner}{number}"}))
        assert outcome.text == "done"

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(call("ann", number))
            group.create_task(call("bob", number))
    await host.aclose()
    for note in upstream.noted(" shared "):
        running += 1 if note.startswith("slow begins") else -1
        maximum = max(maximum, running)
    assert (running, maximum) == (0, 2)
