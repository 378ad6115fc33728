"""The line: whose turn it is, who has to go, and that no place is ever lost."""

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
class Desk:
    """Two kinds of places behind one line, `left` and `right`, each for so much at once; who may go where is in the
    request: `l`, `r` or `lr`, and how much of a place it takes."""

    bounds: QueueConfig = field(default_factory=QueueConfig)
    room: dict[str, int] = field(default_factory=lambda: {"l": 1})
    clock: Clock = field(default_factory=Clock)
    served: list[str] = field(default_factory=list)
    held: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.line: WaitingQueue[tuple[str, int]] = WaitingQueue(self.bounds, self.give_back, self.clock)

    def give_back(self, place: tuple[str, int]) -> None:
        self.held.remove(place)
        self.room[place[0]] += place[1]
        self.line.serve()

    async def ask(
        self, name: str, owner: str = "", where: str = "l", size: int = 1, *, resumes: bool = False
    ) -> tuple[str, int] | None:
        sides = {side: 1 << index for index, side in enumerate(sorted(self.room))}

        def attempt(barred: int) -> SlotOffer[tuple[str, int]]:
            mine = [side for side in where if side in self.room]
            for side in mine:
                if not sides[side] & barred and self.room[side] >= size:
                    self.room[side] -= size
                    place = (side, size)
                    self.held.append(place)
                    self.served.append(name)
                    return SlotOffer(place)
            return SlotOffer(None, sum(sides[side] for side in mine))

        until = asyncio.get_running_loop().time() + self.bounds.timeout_s
        return await self.line.wait_for_slot(owner, self.line.number(), attempt, resumes=resumes, until=until)

    async def all_served(self) -> list[str]:
        """Give back place after place until the line is empty."""
        await asyncio.sleep(0)
        while self.held:
            self.give_back(self.held[0])
            await asyncio.sleep(0)
        return self.served


Asked = tuple[str, str, str, int, bool]

ORDERS: dict[str, tuple[dict[str, int], list[Asked], list[str]]] = {
    "one owner's in their order": (
        {"l": 1},
        [("a1", "a", "l", 1, False), ("a2", "a", "l", 1, False), ("a3", "a", "l", 1, False)],
        ["a1", "a2", "a3"],
    ),
    "owners take turns": (
        {"l": 1},
        [(f"a{n}", "a", "l", 1, False) for n in range(1, 5)] + [("b1", "b", "l", 1, False), ("c1", "c", "l", 1, False)],
        ["a1", "a2", "b1", "c1", "a3", "a4"],
    ),
    "whoever goes on comes first": (
        {"l": 1},
        [("a1", "a", "l", 1, False), ("b1", "b", "l", 1, False), ("a2", "a", "l", 1, True)],
        ["a1", "a2", "b1"],
    ),
    "who waits for another place is passed": (
        {"l": 1, "r": 0},
        [("a1", "a", "l", 1, False), ("b1", "b", "r", 1, False), ("c1", "c", "l", 1, False)],
        ["a1", "c1"],
    ),
    "a large one is not passed by small ones": (
        {"l": 2},
        [
            ("a1", "a", "l", 1, False),
            ("b1", "b", "l", 2, False),
            ("c1", "c", "l", 1, False),
            ("c2", "c", "l", 1, False),
        ],
        ["a1", "b1", "c1", "c2"],
    ),
    "and keeps nobody off a place that it does not wait for": (
        {"l": 2, "r": 1},
        [("a1", "a", "l", 1, False), ("b1", "b", "l", 2, False), ("c1", "c", "lr", 1, False)],
        ["a1", "c1", "b1"],
    ),
}


@pytest.mark.parametrize(("room", "asked", "order"), ORDERS.values(), ids=ORDERS)
async def test_whose_turn_it_is(room: dict[str, int], asked: list[Asked], order: list[str]) -> None:
    desk = Desk(room=dict(room))
    tasks = []
    for name, owner, where, size, resumes in asked:
        tasks.append(asyncio.create_task(desk.ask(name, owner, where, size, resumes=resumes)))
        await asyncio.sleep(0)
    assert await desk.all_served() == order
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(desk.line) == 0


BOUNDS: dict[str, tuple[QueueConfig, list[str], dict[str, type[BackendOverloaded]]]] = {
    "nobody waits": (QueueConfig(length=0), ["a", "b"], {"b1": BackendOverloaded}),
    "the gateway is full": (QueueConfig(length=2), ["a"] * 4, {"a4": BackendOverloaded}),
    "of one key there are too many": (QueueConfig(per_owner=1), ["a", "a", "a", "b"], {"a3": ShareExceeded}),
    "the modest newcomer stays and the greediest key's newest goes": (
        QueueConfig(length=3),
        ["a", "a", "a", "a", "b"],
        {"a4": ShareExceeded},
    ),
    "a newcomer that is as greedy goes itself": (
        QueueConfig(length=3),
        ["c", "a", "a", "b", "b"],
        {"b2": ShareExceeded},
    ),
}


@pytest.mark.parametrize(("bounds", "owners", "refused"), BOUNDS.values(), ids=BOUNDS)
async def test_who_has_to_go(
    bounds: QueueConfig, owners: list[str], refused: dict[str, type[BackendOverloaded]]
) -> None:
    desk = Desk(bounds)
    counts: Counter[str] = Counter()
    tasks: dict[str, asyncio.Task[tuple[str, int] | None]] = {}
    for owner in owners:
        counts[owner] += 1
        name = f"{owner}{counts[owner]}"
        tasks[name] = asyncio.create_task(desk.ask(name, owner))
        await asyncio.sleep(0)
    await desk.all_served()
    outcomes = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
    errors = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, BackendOverloaded)}
    assert {name: type(error) for name, error in errors.items()} == refused
    assert sorted(desk.served) == sorted(set(tasks) - set(refused))
    assert all(error.retry_after_s is not None and error.retry_after_s >= 1 for error in errors.values())


async def test_what_goes_on_is_never_refused() -> None:
    desk = Desk(QueueConfig(length=0))
    first = await desk.ask("first")
    going_on = asyncio.create_task(desk.ask("on", resumes=True))
    await asyncio.sleep(0)
    assert first is not None
    desk.give_back(first)
    assert await going_on == ("l", 1)


async def test_nobody_waits_for_longer_than_is_said() -> None:
    desk = Desk(QueueConfig(timeout_s=0.02))
    await desk.ask("first")
    with pytest.raises(BackendOverloaded) as late:
        await desk.ask("second")
    assert (late.value.status, len(desk.line)) == (503, 0)


async def test_how_long_to_stay_away_follows_how_fast_the_line_moves() -> None:
    desk = Desk(room={"l": 1000})
    assert desk.line.expected_s() == 1
    for _ in range(10):
        await desk.ask("quick")
        desk.clock.now += 2.0
    assert desk.line.expected_s() == pytest.approx(2.0)
    desk.room["l"] = 0
    waiting = [asyncio.create_task(desk.ask("slow")) for _ in range(4)]
    await asyncio.sleep(0)
    assert desk.line.expected_s() == pytest.approx(10.0)
    desk.clock.now += 1000
    assert desk.line.expected_s() == MAX_RETRY_AFTER_S
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_place_that_was_given_to_somebody_who_just_left_goes_to_the_next() -> None:
    desk = Desk()
    held = await desk.ask("first")
    leaving, next_one = (asyncio.create_task(desk.ask(name)) for name in ("leaving", "next"))
    await asyncio.sleep(0)
    assert held is not None
    # Both at once: it is given the place, and its task is cancelled before it could run.
    desk.give_back(held)
    leaving.cancel()
    assert await next_one == ("l", 1)
    assert leaving.cancelled() or isinstance(await asyncio.gather(leaving, return_exceptions=True), list)
    assert desk.room["l"] == 0


events = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"),
            st.sampled_from("abc"),
            st.sampled_from(["l", "r", "lr"]),
            st.integers(1, 3),
            st.booleans(),
        ),
        st.tuples(st.just("leave"), st.integers(0, 50)),
        st.tuples(st.just("give back"), st.integers(0, 50)),
        st.tuples(st.just("both"), st.integers(0, 50), st.integers(0, 50)),
    ),
    max_size=60,
)


@settings(max_examples=examples(150), deadline=None)
@given(events=events, length=st.integers(0, 6), per_owner=st.one_of(st.none(), st.integers(1, 4)))
def test_no_place_is_lost_and_nobody_waits_for_ever(
    events: list[tuple[str | int | bool, ...]], length: int, per_owner: int | None
) -> None:
    async def story() -> None:
        desk = Desk(QueueConfig(length, per_owner), room={"l": 3, "r": 3})
        tasks: list[asyncio.Task[tuple[str, int] | None]] = []
        for index, (what, *about) in enumerate(events):
            match what, about:
                case "ask", [str() as owner, str() as where, int() as size, bool() as resumes]:
                    tasks.append(asyncio.create_task(desk.ask(f"{owner}{index}", owner, where, size, resumes=resumes)))
                case "leave", [int() as which] if tasks:
                    tasks[which % len(tasks)].cancel()
                case "give back", [int() as which] if desk.held:
                    desk.give_back(desk.held[which % len(desk.held)])
                case "both", [int() as which, int() as other] if desk.held and tasks:
                    desk.give_back(desk.held[which % len(desk.held)])
                    tasks[other % len(tasks)].cancel()
                case _:
                    continue
            if index % 3:
                await asyncio.sleep(0)
            taken = Counter({"l": 0, "r": 0})
            for side, size in desk.held:
                taken[side] += size
            assert all(desk.room[side] + taken[side] == 3 for side in "lr")
            assert min(desk.room.values()) >= 0
        await asyncio.sleep(0)
        while desk.held:
            desk.give_back(desk.held[0])
            await asyncio.sleep(0)
        assert desk.room == {"l": 3, "r": 3}
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
        while desk.held:
            desk.give_back(desk.held[0])
        assert (len(desk.line), desk.room) == (0, {"l": 3, "r": 3})

    asyncio.run(story())


async def test_one_who_leaves_at_the_moment_is_not_sent_away_as_well() -> None:
    desk = Desk(QueueConfig(length=2))
    await desk.ask("first")
    waiting = [asyncio.create_task(desk.ask(name, "greedy")) for name in ("second", "third")]
    await asyncio.sleep(0)
    # The newcomer runs before the one that is cancelled hears of it.
    newcomer = asyncio.create_task(desk.ask("fourth", "modest"))
    waiting[1].cancel()
    await asyncio.sleep(0)
    assert not newcomer.done()
    assert await desk.all_served() == ["first", "second", "fourth"]
    assert [one.cancelled() for one in (*waiting, newcomer)] == [False, True, False]
