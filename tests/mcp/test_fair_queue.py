"""Places at a server: so many at once whoever calls, and each owner in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.mcp.arguments import sent
from tests.mcp.conftest import Upstream
from unisono.mcp import McpHost, McpLimits
from unisono.mcp.fair_queue import FairQueue, NoSlot


class Desk:
    """Calls that last until they are told to end, in the order in which they got their places."""

    def __init__(self, line: FairQueue) -> None:
        self.line = line
        self.order: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    def call(self, name: str, *, within_s: float = 5.0) -> asyncio.Task[None]:
        """`name` begins with the owner's."""

        async def called() -> None:
            until = asyncio.get_running_loop().time() + within_s
            async with self.line.slot(name[0], until):
                self.order.append(name)
                await self._ends.setdefault(name, asyncio.Event()).wait()

        return asyncio.create_task(called())

    async def end(self, name: str) -> None:
        self._ends.setdefault(name, asyncio.Event()).set()
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_owners_take_turns_however_much_each_of_them_wants() -> None:
    desk = Desk(FairQueue(1, 100))
    tasks = [desk.call(name) for name in ("a1", "a2", "a3", "a4")]
    await settled()
    tasks += [desk.call(name) for name in ("b1", "b2", "c1")]
    await settled()
    for name in ("a1", "a2", "b1", "c1", "a3", "b2", "a4"):
        assert desk.order[-1] == name
        await desk.end(name)
    await asyncio.gather(*tasks)
    assert desk.line.users == 0


Leaving = Callable[[Desk, asyncio.Task[None]], object]


@pytest.mark.parametrize("moment", ["while it waits", "as its place comes"])
async def test_a_place_that_is_no_longer_wanted_goes_to_the_next(moment: str) -> None:
    desk = Desk(FairQueue(1, 100))
    tasks = [desk.call("a1")]
    await settled()
    leaves, stays = desk.call("b1"), desk.call("c1")
    await settled()
    if moment == "while it waits":
        leaves.cancel()
        await settled()
        await desk.end("a1")
    else:
        desk._ends["a1"].set()
        await asyncio.sleep(0)
        leaves.cancel()
        await settled()
    assert desk.order == ["a1", "c1"]
    await desk.end("c1")
    await asyncio.gather(*tasks, stays)
    assert leaves.cancelled()
    # Nothing was lost on the way.
    last = desk.call("d1")
    await settled()
    assert desk.order[-1] == "d1"
    await desk.end("d1")
    await last


async def test_who_waits_too_long_or_behind_too_many_gets_no_place_and_others_do() -> None:
    desk = Desk(FairQueue(1, 2))
    first = desk.call("a1")
    await settled()
    waiting = [desk.call("a2", within_s=0.05), desk.call("a3")]
    await settled()
    with pytest.raises(NoSlot, match="Too many"):
        await desk.call("a4")
    other = desk.call("b1")
    with pytest.raises(NoSlot, match="deadline"):
        await waiting[0]
    await desk.end("a1")
    await desk.end("b1" if desk.order[-1] == "b1" else "a3")
    await desk.end("a3")
    await desk.end("b1")
    await asyncio.gather(first, waiting[1], other)
    assert sorted(desk.order) == ["a1", "a3", "b1"]


async def test_the_places_of_a_server_are_for_all_owners_together(upstream: Upstream) -> None:
    host = McpHost(limits=McpLimits())
    running, most = 0, 0

    async def call(owner: str, number: int) -> None:
        nonlocal running, most
        # A talk of an owner has connections of its own, and no places of its own.
        server = upstream.server("modern", concurrent=2, owner=f"{owner}\0talk {number}")
        outcome = await host.call(server, "slow", sent({"seconds": 0.2, "name": f"shared {owner}{number}"}))
        assert outcome.text == "done"

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(call("ann", number))
            group.create_task(call("bob", number))
    await host.aclose()
    for line in upstream.noted(" shared "):
        running += 1 if line.startswith("slow begins") else -1
        most = max(most, running)
    assert (running, most) == (0, 2)
