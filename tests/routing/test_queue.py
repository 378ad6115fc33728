"""Waiting queue: order of requests, rejections, and conservation of slots."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import examples
from tests.routing.doubles import Clock
from unisono.errors import BackendOverloaded, ShareExceeded
from unisono.routing.queue import MAX_RETRY_AFTER_S, QueueConfig, SlotOffer, WaitingQueue


@dataclass
class QueuedSlots:
    """Queue in front of two kinds of slots, `l` and `r`, each with a limited size.

    A request names the kinds that it can use (`l`, `r` or `lr`), and its size.
    """

    bounds: QueueConfig = field(default_factory=QueueConfig)
    room: dict[str, int] = field(default_factory=lambda: {"l": 1})
    clock: Clock = field(default_factory=Clock)
    served: list[str] = field(default_factory=list)
    in_use: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting_queue: WaitingQueue[tuple[str, int]] = WaitingQueue(self.bounds, self.release, self.clock)

    def release(self, slot: tuple[str, int]) -> None:
        self.in_use.remove(slot)
        self.room[slot[0]] += slot[1]
        self.waiting_queue.serve()

    async def ask(
        self, name: str, owner: str = "", kinds: str = "l", size: int = 1, *, resumes: bool = False
    ) -> tuple[str, int] | None:
        sides = {side: 1 << index for index, side in enumerate(sorted(self.room))}

        def attempt(barred: int) -> SlotOffer[tuple[str, int]]:
            mine = [side for side in kinds if side in self.room]
            for side in mine:
                if not sides[side] & barred and self.room[side] >= size:
                    self.room[side] -= size
                    slot = (side, size)
                    self.in_use.append(slot)
                    self.served.append(name)
                    return SlotOffer(slot)
            return SlotOffer(None, sum(sides[side] for side in mine))

        until = asyncio.get_running_loop().time() + self.bounds.timeout_s
        return await self.waiting_queue.wait_for_slot(
            owner, self.waiting_queue.number(), attempt, resumes=resumes, until=until
        )

    async def all_served(self) -> list[str]:
        """Release slot after slot until the queue is empty."""
        await asyncio.sleep(0)
        while self.in_use:
            self.release(self.in_use[0])
            await asyncio.sleep(0)
        return self.served


QueuedRequest = tuple[str, str, str, int, bool]

ORDERS: dict[str, tuple[dict[str, int], list[QueuedRequest], list[str]]] = {
    "one owner in order": (
        {"l": 1},
        [("a1", "a", "l", 1, False), ("a2", "a", "l", 1, False), ("a3", "a", "l", 1, False)],
        ["a1", "a2", "a3"],
    ),
    "owners take turns": (
        {"l": 1},
        [(f"a{n}", "a", "l", 1, False) for n in range(1, 5)] + [("b1", "b", "l", 1, False), ("c1", "c", "l", 1, False)],
        ["a1", "a2", "b1", "c1", "a3", "a4"],
    ),
    "resumed answers first": (
        {"l": 1},
        [("a1", "a", "l", 1, False), ("b1", "b", "l", 1, False), ("a2", "a", "l", 1, True)],
        ["a1", "a2", "b1"],
    ),
    "requests for another slot are passed": (
        {"l": 1, "r": 0},
        [("a1", "a", "l", 1, False), ("b1", "b", "r", 1, False), ("c1", "c", "l", 1, False)],
        ["a1", "c1"],
    ),
    "a large request is not passed by small ones": (
        {"l": 2},
        [
            ("a1", "a", "l", 1, False),
            ("b1", "b", "l", 2, False),
            ("c1", "c", "l", 1, False),
            ("c2", "c", "l", 1, False),
        ],
        ["a1", "b1", "c1", "c2"],
    ),
    "a large request does not block other slots": (
        {"l": 2, "r": 1},
        [("a1", "a", "l", 1, False), ("b1", "b", "l", 2, False), ("c1", "c", "lr", 1, False)],
        ["a1", "c1", "b1"],
    ),
}


@pytest.mark.parametrize(("room", "requests", "order"), ORDERS.values(), ids=ORDERS)
async def test_requests_are_served_in_a_fair_order(
    room: dict[str, int], requests: list[QueuedRequest], order: list[str]
) -> None:
    slots = QueuedSlots(room=dict(room))
    tasks = []
    for name, owner, kinds, size, resumes in requests:
        tasks.append(asyncio.create_task(slots.ask(name, owner, kinds, size, resumes=resumes)))
        await asyncio.sleep(0)
    assert await slots.all_served() == order
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(slots.waiting_queue) == 0


BOUNDS: dict[str, tuple[QueueConfig, list[str], dict[str, type[BackendOverloaded]]]] = {
    "no queue": (QueueConfig(length=0), ["a", "b"], {"b1": BackendOverloaded}),
    "full queue": (QueueConfig(length=2), ["a"] * 4, {"a4": BackendOverloaded}),
    "too many requests of one owner": (QueueConfig(per_owner=1), ["a", "a", "a", "b"], {"a3": ShareExceeded}),
    "newest request of the largest owner is rejected": (
        QueueConfig(length=3),
        ["a", "a", "a", "a", "b"],
        {"a4": ShareExceeded},
    ),
    "newcomer of the largest owner is rejected": (
        QueueConfig(length=3),
        ["c", "a", "a", "b", "b"],
        {"b2": ShareExceeded},
    ),
}


@pytest.mark.parametrize(("bounds", "owners", "refused"), BOUNDS.values(), ids=BOUNDS)
async def test_requests_over_the_limits_are_rejected(
    bounds: QueueConfig, owners: list[str], refused: dict[str, type[BackendOverloaded]]
) -> None:
    slots = QueuedSlots(bounds)
    counts: Counter[str] = Counter()
    tasks: dict[str, asyncio.Task[tuple[str, int] | None]] = {}
    for owner in owners:
        counts[owner] += 1
        name = f"{owner}{counts[owner]}"
        tasks[name] = asyncio.create_task(slots.ask(name, owner))
        await asyncio.sleep(0)
    await slots.all_served()
    outcomes = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
    errors = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, BackendOverloaded)}
    assert {name: type(error) for name, error in errors.items()} == refused
    assert sorted(slots.served) == sorted(set(tasks) - set(refused))
    assert all(error.retry_after_s is not None and error.retry_after_s >= 1 for error in errors.values())


async def test_a_resumed_answer_is_never_rejected() -> None:
    slots = QueuedSlots(QueueConfig(length=0))
    first = await slots.ask("first")
    resumed = asyncio.create_task(slots.ask("on", resumes=True))
    await asyncio.sleep(0)
    assert first is not None
    slots.release(first)
    assert await resumed == ("l", 1)


async def test_a_waiting_request_is_rejected_at_the_timeout() -> None:
    slots = QueuedSlots(QueueConfig(timeout_s=0.02))
    await slots.ask("first")
    with pytest.raises(BackendOverloaded) as late:
        await slots.ask("second")
    assert (late.value.status, len(slots.waiting_queue)) == (503, 0)


async def test_the_expected_wait_follows_the_pace_of_the_queue() -> None:
    slots = QueuedSlots(room={"l": 1000})
    assert slots.waiting_queue.expected_s() == 1
    for _ in range(10):
        await slots.ask("quick")
        slots.clock.now += 2.0
    assert slots.waiting_queue.expected_s() == pytest.approx(2.0)
    slots.room["l"] = 0
    waiting = [asyncio.create_task(slots.ask("slow")) for _ in range(4)]
    await asyncio.sleep(0)
    assert slots.waiting_queue.expected_s() == pytest.approx(10.0)
    slots.clock.now += 1000
    assert slots.waiting_queue.expected_s() == MAX_RETRY_AFTER_S
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_slot_given_to_a_cancelled_request_goes_to_the_next() -> None:
    slots = QueuedSlots()
    in_use = await slots.ask("first")
    cancelled_task, following = (asyncio.create_task(slots.ask(name)) for name in ("leaving", "next"))
    await asyncio.sleep(0)
    assert in_use is not None
    # The request gets the slot, and its task is cancelled before it runs.
    slots.release(in_use)
    cancelled_task.cancel()
    assert await following == ("l", 1)
    assert cancelled_task.cancelled()
    assert slots.served == ["first", "leaving", "next"]
    assert slots.room["l"] == 0


events = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"),
            st.sampled_from("abc"),
            st.sampled_from(["l", "r", "lr"]),
            st.integers(1, 3),
            st.booleans(),
        ),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
        st.tuples(st.just("release"), st.integers(0, 50)),
        st.tuples(st.just("both"), st.integers(0, 50), st.integers(0, 50)),
    ),
    max_size=60,
)


@settings(max_examples=examples(150), deadline=None)
@given(events=events, length=st.integers(0, 6), per_owner=st.one_of(st.none(), st.integers(1, 4)))
def test_no_slot_is_lost_and_no_request_waits_forever(
    events: list[tuple[str | int | bool, ...]], length: int, per_owner: int | None
) -> None:
    async def story() -> None:
        slots = QueuedSlots(QueueConfig(length, per_owner), room={"l": 3, "r": 3})
        tasks: list[asyncio.Task[tuple[str, int] | None]] = []
        for index, (what, *about) in enumerate(events):
            match what, about:
                case "ask", [str() as owner, str() as kinds, int() as size, bool() as resumes]:
                    tasks.append(asyncio.create_task(slots.ask(f"{owner}{index}", owner, kinds, size, resumes=resumes)))
                case "cancel", [int() as which] if tasks:
                    tasks[which % len(tasks)].cancel()
                case "release", [int() as which] if slots.in_use:
                    slots.release(slots.in_use[which % len(slots.in_use)])
                case "both", [int() as which, int() as other] if slots.in_use and tasks:
                    slots.release(slots.in_use[which % len(slots.in_use)])
                    tasks[other % len(tasks)].cancel()
                case _:
                    continue
            if index % 3:
                await asyncio.sleep(0)
            taken = Counter({"l": 0, "r": 0})
            for side, size in slots.in_use:
                taken[side] += size
            assert all(slots.room[side] + taken[side] == 3 for side in "lr")
            assert min(slots.room.values()) >= 0
        await asyncio.sleep(0)
        while slots.in_use:
            slots.release(slots.in_use[0])
            await asyncio.sleep(0)
        assert slots.room == {"l": 3, "r": 3}
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
        while slots.in_use:
            slots.release(slots.in_use[0])
        assert (len(slots.waiting_queue), slots.room) == (0, {"l": 3, "r": 3})

    asyncio.run(story())


async def test_a_cancelled_request_is_not_rejected_in_addition() -> None:
    slots = QueuedSlots(QueueConfig(length=2))
    await slots.ask("first")
    waiting = [asyncio.create_task(slots.ask(name, "greedy")) for name in ("second", "third")]
    await asyncio.sleep(0)
    # The newcomer runs before the cancelled task.
    newcomer = asyncio.create_task(slots.ask("fourth", "modest"))
    waiting[1].cancel()
    await asyncio.sleep(0)
    assert not newcomer.done()
    assert await slots.all_served() == ["first", "second", "fourth"]
    assert [one.cancelled() for one in (*waiting, newcomer)] == [False, True, False]
