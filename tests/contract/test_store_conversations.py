"""Conversations, leases, keys, secrets and counters, as every store must keep them."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from tests.contract.state import EVERY_ITEM, answered, conversation, fresh, response, said
from tests.contract.stores import SMALL, Home
from unisono.core.state_store import BackgroundRun, LogWrite, Status
from unisono.errors import KeyReused, NotFound, StoreConflict, StoreTooLarge


async def test_a_conversation_comes_back_as_it_was_kept(home: Home) -> None:
    store = await home.open()
    talk = conversation()
    for _ in range(2):
        await store.create_conversation("ann", talk, EVERY_ITEM)
    assert await store.conversation("ann", talk.id) == talk
    assert await store.conversation_items("ann", talk.id) == EVERY_ITEM
    for item in EVERY_ITEM:
        assert await store.conversation_item("ann", talk.id, item.id) == item
        assert await store.item("ann", item.id) == item
    with pytest.raises(StoreConflict):
        await store.create_conversation("ann", replace(talk, metadata={}), EVERY_ITEM)
    changed = replace(talk, metadata={"topic": "coffee", "cups": 2})
    assert await store.set_metadata("ann", talk.id, changed.metadata) == changed
    assert await store.conversation("ann", talk.id) == changed


async def test_items_are_read_in_pages_both_ways(home: Home) -> None:
    store = await home.open()
    talk = conversation()
    items = tuple(said(str(number)) for number in range(7))
    await store.create_conversation("ann", talk, items[:3])
    assert await store.append("ann", talk.id, items[3:], revision=0) == 1
    for order, newest_first in ((items, False), (items[::-1], True)):
        read, after = [], None
        while page := await store.conversation_items("ann", talk.id, after=after, limit=3, newest_first=newest_first):
            assert len(page) <= 3
            read += page
            after = page[-1].id
        assert tuple(read) == order
    assert await store.conversation_items("ann", talk.id, after="msg_none") is None
    assert await store.conversation_items("ann", talk.id, limit=0) == ()


async def test_a_deleted_item_leaves_the_order_of_the_others(home: Home) -> None:
    store = await home.open()
    talk = conversation()
    items = tuple(said(str(number)) for number in range(4))
    await store.create_conversation("ann", talk, items)
    assert await store.delete_item("ann", talk.id, items[1].id) is True
    assert await store.delete_item("ann", talk.id, items[1].id) is False
    assert await store.item("ann", items[1].id) is None
    assert await store.append("ann", talk.id, [items[1]]) == 2
    assert await store.conversation_items("ann", talk.id) == (items[0], items[2], items[3], items[1])
    assert await store.delete_conversation("ann", talk.id) is True
    assert await store.conversation_items("ann", talk.id) is None
    assert await store.conversation_item("ann", talk.id, items[0].id) is None
    with pytest.raises(NotFound):
        await store.append("ann", talk.id, [said("late")])


async def test_an_append_is_done_once_and_only_at_its_revision(home: Home) -> None:
    store = await home.open()
    talk = conversation()
    await store.create_conversation("ann", talk)
    mine = (said("mine"), answered("yes"))
    for _ in range(3):
        assert await store.append("ann", talk.id, mine, revision=0) == 1
    with pytest.raises(StoreConflict):
        await store.append("ann", talk.id, [said("another's")], revision=0)
    with pytest.raises(StoreConflict):
        await store.append("ann", talk.id, [said("new"), mine[0]], revision=1)
    with pytest.raises(StoreConflict):
        await store.append("ann", talk.id, [said("twice", "msg_twice"), said("twice", "msg_twice")], revision=1)
    assert await store.conversation_items("ann", talk.id) == mine


async def test_of_many_appends_at_one_revision_one_is_done(home: Home) -> None:
    stores = [await home.open()]
    if home.shared:
        stores.append(await home.open())
    talk = conversation()
    await stores[0].create_conversation("ann", talk)
    turns = [(said(f"{number}"), answered(f"{number}")) for number in range(20)]
    results = await asyncio.gather(
        *(stores[number % len(stores)].append("ann", talk.id, turn, revision=0) for number, turn in enumerate(turns)),
        return_exceptions=True,
    )
    assert Counter(map(type, results)) == {int: 1, StoreConflict: 19}
    won = next(turn for turn, result in zip(turns, results, strict=True) if result == 1)
    assert await stores[0].conversation_items("ann", talk.id) == won


async def test_a_conversation_that_grows_too_large_stays_as_it_was(home: Home) -> None:
    store = await home.open(bounds=SMALL)
    talk = conversation()
    await store.create_conversation("ann", talk, [said("x" * 3_000) for _ in range(10)])
    before = await store.conversation_items("ann", talk.id)
    with pytest.raises(StoreTooLarge):
        await store.append("ann", talk.id, [said("x" * 3_000) for _ in range(5)])
    with pytest.raises(StoreTooLarge):
        await store.append("ann", talk.id, [said("x" * 5_000)])
    with pytest.raises(StoreTooLarge):
        await store.create_conversation("ann", conversation(), [said("x" * 3_000) for _ in range(20)])
    assert await store.conversation_items("ann", talk.id) == before
    assert await store.delete_item("ann", talk.id, (before or ())[0].id)
    assert await store.append("ann", talk.id, [said("x" * 3_000) for _ in range(3)]) == 2


async def test_who_holds_the_lease_is_the_only_one_who_writes(home: Home) -> None:
    store = await home.open()
    other = await home.open() if home.shared else store
    talk = conversation()
    await store.create_conversation("ann", talk, [said("first", "msg_first")])
    lease = await store.acquire("ann", talk.id, "me", 5)
    assert lease
    assert await other.acquire("ann", talk.id, "you", 5) is None
    assert await store.acquire("ann", talk.id, "me", 5) == lease
    running = response(conversation=talk.id)
    for refused in (
        other.append("ann", talk.id, [said("in between")]),
        other.delete_item("ann", talk.id, "msg_first"),
        other.delete_conversation("ann", talk.id),
        other.create("ann", running),
    ):
        with pytest.raises(StoreConflict):
            await refused
    await store.create("ann", running, lease=lease)
    assert await store.append("ann", talk.id, [said("mine")], lease=lease) == 1
    await store.release(lease)
    assert await other.append("ann", talk.id, [said("yours")]) == 2
    again = await other.acquire("ann", talk.id, "you", 5)
    assert again
    assert again.fence > lease.fence


async def test_an_owner_that_was_replaced_writes_no_more(home: Home) -> None:
    store = await home.open()
    running = response()
    slow = await store.acquire("ann", running.id, "slow", 0.15)
    assert slow
    await store.create("ann", running, lease=slow, log=LogWrite(events=(b"0",)))
    await asyncio.sleep(0.2)
    await store.log(slow, running.id, LogWrite(1, (b"1",)))
    quick = await store.acquire("ann", running.id, "quick", 5)
    assert quick
    assert quick.fence > slow.fence
    assert await store.renew(slow, 5) is False
    await store.release(slow)
    assert await store.acquire("ann", running.id, "third", 5) is None
    done = replace(running, status=Status.COMPLETED)
    with pytest.raises(StoreConflict):
        await store.log(slow, running.id, LogWrite(2, (b"2",)))
    with pytest.raises(StoreConflict):
        await store.update("ann", done, lease=slow)
    assert await store.renew(quick, 5) is True
    taken = await store.acquire("ann", running.id, "canceller", 5, force=True)
    assert taken
    with pytest.raises(StoreConflict):
        await store.update("ann", done, lease=quick)
    with pytest.raises(StoreConflict):
        await store.update("ann", done, lease=replace(taken, tenant="bob"))
    await store.update("ann", replace(running, status=Status.CANCELLED), lease=taken)


async def test_of_many_who_want_a_lease_one_gets_it(home: Home) -> None:
    store = await home.open()
    leases = await asyncio.gather(*(store.acquire("ann", "resp_wanted", f"me{n}", 5) for n in range(20)))
    assert sum(lease is not None for lease in leases) == 1


async def test_a_run_nobody_watches_is_named_until_somebody_does(home: Home) -> None:
    store = await home.open()
    runs = [
        BackgroundRun("a:b", fresh("resp")),
        BackgroundRun("bob", fresh("resp")),
        BackgroundRun("ann", fresh("resp")),
    ]
    for number, run in enumerate(runs):
        await store.watch(run, 0.05 + 0.01 * number)
    assert await store.lapsed() == ()
    await asyncio.sleep(0.15)
    assert await store.lapsed() == tuple(runs)
    assert await store.lapsed(2) == tuple(runs[:2])
    await store.watch(runs[0], 5)
    await store.unwatch(runs[1])
    await store.unwatch(runs[1])
    assert await store.lapsed() == (runs[2],)


async def test_an_idempotency_key_belongs_to_one_body(home: Home) -> None:
    store = await home.open()
    assert await store.claim("ann", "k 1\n{}", "digest", "resp_1") == "resp_1"
    assert await store.claim("ann", "k 1\n{}", "digest", "resp_1") == "resp_1"
    assert await store.claim("ann", "k 1\n{}", "digest", "resp_2") == "resp_1"
    with pytest.raises(KeyReused):
        await store.claim("ann", "k 1\n{}", "another", "resp_3")
    assert await store.claim("bob", "k 1\n{}", "another", "resp_3") == "resp_3"
    await store.unclaim("ann", "k 1\n{}", "resp_2")
    assert await store.claim("ann", "k 1\n{}", "digest", "resp_4") == "resp_1"
    await store.unclaim("ann", "k 1\n{}", "resp_1")
    assert await store.claim("ann", "k 1\n{}", "another", "resp_5") == "resp_5"


async def test_whoever_has_a_key_may_keep_it_longer(home: Home) -> None:
    store = await home.open()
    for key, again_s in (("short", None), ("long", 5.0), ("not shorter", 0.01)):
        first_s = 5.0 if key == "not shorter" else 0.3
        assert await store.claim("ann", key, "digest", "resp_1", for_s=first_s) == "resp_1"
        if again_s is not None:
            assert await store.claim("ann", key, "digest", "resp_1", for_s=again_s) == "resp_1"
        # Nobody else's word counts.
        assert await store.claim("ann", key, "digest", "resp_2", for_s=9.0) == "resp_1"
    await asyncio.sleep(0.4)
    owners = [await store.claim("ann", key, "digest", "resp_3") for key in ("short", "long", "not shorter")]
    assert owners == ["resp_3", "resp_1", "resp_1"]


async def test_fifty_duplicates_at_once_are_one_response(home: Home) -> None:
    store = await home.open()
    owners = await asyncio.gather(*(store.claim("ann", "key", "digest", f"resp_{n}") for n in range(50)))
    assert len(set(owners)) == 1


async def test_a_secret_is_made_once(home: Home) -> None:
    store = await home.open()
    other = await home.open() if home.shared else store
    made = await asyncio.gather(*((store, other)[n % 2].secret("salt", bytes([n]) * 32) for n in range(10)))
    assert len(set(made)) == 1
    assert await store.secret("pepper", b"p") == b"p"


async def test_a_counter_counts_everything_once(home: Home) -> None:
    store = await home.open()
    assert await store.count("ann", "tokens", 5, once="a", for_s=5) == 5
    assert await store.count("ann", "tokens", 5, once="a", for_s=5) == 5
    assert await store.count("bob", "tokens", 1, once="a", for_s=5) == 1
    await asyncio.gather(*(store.count("ann", "tokens", 2, once=f"b{n}", for_s=0.2) for n in range(10)))
    assert await store.count("ann", "tokens", 0, once="c", for_s=0.1) == 25
    await asyncio.sleep(0.25)
    assert await store.count("ann", "tokens", 1, once="d", for_s=5) == 1
