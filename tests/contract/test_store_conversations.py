"""Contract of every store for conversations, leases, idempotency keys, secrets and counters."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from tests.contract.state import EVERY_ITEM, answered, conversation, fresh, response, said
from tests.contract.stores import SMALL, StoreFactory
from unisono.core.error_texts import ConversationConflict
from unisono.core.state_store import BackgroundRun, LogWrite, Status
from unisono.errors import KeyReused, NotFound, StoreConflict, StoreTooLarge


async def test_stored_conversation_is_read_unchanged(factory: StoreFactory) -> None:
    store = await factory.open()
    chat = conversation()
    for _ in range(2):
        await store.create_conversation("ann", chat, EVERY_ITEM)
    assert await store.conversation("ann", chat.id) == chat
    assert await store.conversation_items("ann", chat.id) == EVERY_ITEM
    for item in EVERY_ITEM:
        assert await store.conversation_item("ann", chat.id, item.id) == item
        assert await store.item("ann", item.id) == item
    with pytest.raises(StoreConflict):
        await store.create_conversation("ann", replace(chat, metadata={}), EVERY_ITEM)
    changed = replace(chat, metadata={"topic": "coffee", "cups": 2})
    assert await store.set_metadata("ann", chat.id, changed.metadata) == changed
    assert await store.conversation("ann", chat.id) == changed


async def test_items_are_paged_in_both_directions(factory: StoreFactory) -> None:
    store = await factory.open()
    chat = conversation()
    items = tuple(said(str(number)) for number in range(7))
    await store.create_conversation("ann", chat, items[:3])
    assert await store.append("ann", chat.id, items[3:], revision=0) == 1
    for order, newest_first in ((items, False), (items[::-1], True)):
        pages, after = [], None
        while page := await store.conversation_items("ann", chat.id, after=after, limit=3, newest_first=newest_first):
            assert len(page) <= 3
            pages += page
            after = page[-1].id
        assert tuple(pages) == order
    assert await store.conversation_items("ann", chat.id, after="msg_none") is None
    assert await store.conversation_items("ann", chat.id, limit=0) == ()


@pytest.mark.parametrize("newest_first", [False, True])
async def test_the_items_that_were_added_first_are_read(factory: StoreFactory, newest_first: bool) -> None:
    store = await factory.open()
    chat = conversation()
    items = tuple(said(str(number)) for number in range(6))
    await store.create_conversation("ann", chat, items[:4])
    await store.append("ann", chat.id, items[4:])
    assert await store.delete_item("ann", chat.id, items[1].id)
    head = await store.conversation("ann", chat.id)
    assert head is not None
    assert head.added == 6
    step = -1 if newest_first else 1
    for upto, expected in ((0, ()), (1, items[:1]), (2, items[:1]), (4, (items[0], *items[2:4])), (9, None)):
        expected = (items[0], *items[2:]) if expected is None else expected
        for limit, after in ((None, 0), (2, 0), (None, 1)):
            start = expected[::step][after - 1].id if after and expected else None
            read = await store.conversation_items(
                "ann", chat.id, upto=upto, limit=limit, newest_first=newest_first, after=start
            )
            assert read == expected[::step][after if start else 0 :][:limit]


async def test_deleting_an_item_keeps_the_order_of_the_others(factory: StoreFactory) -> None:
    store = await factory.open()
    chat = conversation()
    items = tuple(said(str(number)) for number in range(4))
    await store.create_conversation("ann", chat, items)
    assert await store.delete_item("ann", chat.id, items[1].id) is True
    assert await store.delete_item("ann", chat.id, items[1].id) is False
    assert await store.item("ann", items[1].id) is None
    assert await store.append("ann", chat.id, [items[1]]) == 2
    assert await store.conversation_items("ann", chat.id) == (items[0], items[2], items[3], items[1])
    assert await store.delete_conversation("ann", chat.id) is True
    assert await store.conversation_items("ann", chat.id) is None
    assert await store.conversation_item("ann", chat.id, items[0].id) is None
    with pytest.raises(NotFound):
        await store.append("ann", chat.id, [said("late")])


async def test_append_is_idempotent_and_needs_the_current_revision(factory: StoreFactory) -> None:
    store = await factory.open()
    chat = conversation()
    await store.create_conversation("ann", chat)
    turn = (said("mine"), answered("yes"))
    for _ in range(3):
        assert await store.append("ann", chat.id, turn, revision=0) == 1
    with pytest.raises(StoreConflict):
        await store.append("ann", chat.id, [said("another's")], revision=0)
    with pytest.raises(StoreConflict):
        await store.append("ann", chat.id, [said("new"), turn[0]], revision=1)
    with pytest.raises(StoreConflict):
        await store.append("ann", chat.id, [said("twice", "msg_twice"), said("twice", "msg_twice")], revision=1)
    assert await store.conversation_items("ann", chat.id) == turn


async def test_only_one_of_concurrent_appends_succeeds(factory: StoreFactory) -> None:
    stores = [await factory.open()]
    if factory.shared:
        stores.append(await factory.open())
    chat = conversation()
    await stores[0].create_conversation("ann", chat)
    turns = [(said(f"{number}"), answered(f"{number}")) for number in range(20)]
    results = await asyncio.gather(
        *(stores[number % len(stores)].append("ann", chat.id, turn, revision=0) for number, turn in enumerate(turns)),
        return_exceptions=True,
    )
    assert Counter(map(type, results)) == {int: 1, ConversationConflict: 19}
    stored = next(turn for turn, result in zip(turns, results, strict=True) if result == 1)
    assert await stores[0].conversation_items("ann", chat.id) == stored


async def test_append_beyond_the_size_limit_changes_nothing(factory: StoreFactory) -> None:
    store = await factory.open(bounds=SMALL)
    chat = conversation()
    await store.create_conversation("ann", chat, [said("x" * 3_000) for _ in range(10)])
    before = await store.conversation_items("ann", chat.id)
    with pytest.raises(StoreTooLarge):
        await store.append("ann", chat.id, [said("x" * 3_000) for _ in range(5)])
    with pytest.raises(StoreTooLarge, match=r"'items\.1' cannot be stored"):
        await store.append("ann", chat.id, [said("x"), said("x" * 5_000)])
    with pytest.raises(StoreTooLarge, match=r"'items\.1' cannot be stored") as caught:
        await store.create_conversation("ann", conversation(), [said("x"), said("x" * 5_000)])
    assert caught.value.param == "items.1"
    with pytest.raises(StoreTooLarge):
        await store.create_conversation("ann", conversation(), [said("x" * 3_000) for _ in range(20)])
    assert await store.conversation_items("ann", chat.id) == before
    assert await store.delete_item("ann", chat.id, (before or ())[0].id)
    assert await store.append("ann", chat.id, [said("x" * 3_000) for _ in range(3)]) == 2


async def test_only_the_lease_holder_can_write(factory: StoreFactory) -> None:
    store = await factory.open()
    other = await factory.open() if factory.shared else store
    chat = conversation()
    await store.create_conversation("ann", chat, [said("first", "msg_first")])
    lease = await store.acquire("ann", chat.id, "me", 5)
    assert lease
    assert await other.acquire("ann", chat.id, "you", 5) is None
    assert await store.acquire("ann", chat.id, "me", 5) == lease
    running = response(conversation=chat.id)
    for write in (
        other.append("ann", chat.id, [said("in between")]),
        other.delete_item("ann", chat.id, "msg_first"),
        other.delete_conversation("ann", chat.id),
        other.create("ann", running),
    ):
        with pytest.raises(ConversationConflict, match="has a response in progress") as refused:
            await write
        assert refused.value.param == "conversation"
    await store.create("ann", running, lease=lease)
    assert await store.append("ann", chat.id, [said("mine")], lease=lease) == 1
    await store.release(lease)
    assert await other.append("ann", chat.id, [said("yours")]) == 2
    second_lease = await other.acquire("ann", chat.id, "you", 5)
    assert second_lease
    assert second_lease.fence > lease.fence


async def test_replaced_lease_owner_cannot_write(factory: StoreFactory) -> None:
    store = await factory.open()
    running = response()
    lapsed = await store.acquire("ann", running.id, "slow", 0.15)
    assert lapsed
    await store.create("ann", running, lease=lapsed, log=LogWrite(events=(b"0",)))
    await asyncio.sleep(0.2)
    await store.log(lapsed, running.id, LogWrite(1, (b"1",)))
    current = await store.acquire("ann", running.id, "quick:resp_1", 5)
    assert current
    assert current.fence > lapsed.fence
    assert await store.renew(lapsed, 5) is False
    await store.release(lapsed)
    assert await store.acquire("ann", running.id, "third", 5) is None
    done = replace(running, status=Status.COMPLETED)
    with pytest.raises(StoreConflict):
        await store.log(lapsed, running.id, LogWrite(2, (b"2",)))
    with pytest.raises(StoreConflict):
        await store.update("ann", done, lease=lapsed)
    assert await store.renew(current, 5) is True
    forced = await store.acquire("ann", running.id, "canceller:resp_1", 5, force=True)
    assert forced
    with pytest.raises(StoreConflict):
        await store.update("ann", done, lease=current)
    with pytest.raises(StoreConflict):
        await store.update("ann", done, lease=replace(forced, tenant="bob"))
    await store.update("ann", replace(running, status=Status.CANCELLED), lease=forced)


async def test_an_ended_lease_is_reserved_for_the_same_response(factory: StoreFactory) -> None:
    store = await factory.open()
    chat = conversation()
    await store.create_conversation("ann", chat)
    lease = await store.acquire("ann", chat.id, "a:0:resp_1", 5, reserve_s=60)
    assert lease
    assert await store.acquire("ann", chat.id, "b:0:resp_1", 5, reserve_s=60) is None
    # The owner hands the lease over.
    assert await store.renew(lease, 0) is True
    assert await store.acquire("ann", chat.id, "b:1:resp_2", 5, reserve_s=60) is None
    assert await store.acquire("ann", chat.id, "resp_2", 5) is None
    with pytest.raises(ConversationConflict):
        await store.append("ann", chat.id, [said("in between")])
    await asyncio.sleep(0.01)
    next_lease = await store.acquire("ann", chat.id, "b:2:resp_1", 5, reserve_s=60)
    assert next_lease
    assert next_lease.fence > lease.fence
    assert await store.acquire("ann", chat.id, "c:0:resp_1", 5, reserve_s=60) is None
    assert await store.renew(next_lease, 5) is True
    assert await store.acquire("ann", chat.id, "c:1:resp_1", 5, reserve_s=60) is None
    await store.release(next_lease)
    assert await store.acquire("ann", chat.id, "resp_2", 5)


async def test_a_reserve_ends(factory: StoreFactory) -> None:
    store = await factory.open()
    lease = await store.acquire("ann", "conv_ended", "a:0:resp_1", 5, reserve_s=0.1)
    assert lease
    assert await store.renew(lease, 0) is True
    await asyncio.sleep(0.15)
    assert await store.acquire("ann", "conv_ended", "b:0:resp_2", 5)


async def test_only_a_lease_for_the_same_response_is_revoked(factory: StoreFactory) -> None:
    store = await factory.open()
    lease = await store.acquire("ann", "conv_revoked", "a:0:resp_1", 60, reserve_s=60)
    assert lease
    assert await store.acquire("ann", "conv_revoked", "b:0:resp_2", 60, force=True, reserve_s=60) is None
    assert await store.renew(lease, 60) is True
    forced = await store.acquire("ann", "conv_revoked", "b:1:resp_1", 60, force=True, reserve_s=60)
    assert forced
    assert await store.renew(lease, 60) is False


async def test_only_one_concurrent_request_gets_the_lease(factory: StoreFactory) -> None:
    store = await factory.open()
    leases = await asyncio.gather(*(store.acquire("ann", "resp_wanted", f"me{n}", 5) for n in range(20)))
    assert sum(lease is not None for lease in leases) == 1


async def test_lapsed_background_run_is_listed_until_it_is_watched(factory: StoreFactory) -> None:
    store = await factory.open()
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


async def test_idempotency_key_is_bound_to_one_request_body(factory: StoreFactory) -> None:
    store = await factory.open()
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


async def test_owner_can_extend_an_idempotency_key(factory: StoreFactory) -> None:
    store = await factory.open()
    for key, again_s in (("short", None), ("long", 5.0), ("not shorter", 0.01)):
        first_s = 5.0 if key == "not shorter" else 0.3
        assert await store.claim("ann", key, "digest", "resp_1", for_s=first_s) == "resp_1"
        if again_s is not None:
            assert await store.claim("ann", key, "digest", "resp_1", for_s=again_s) == "resp_1"
        # A claim by another owner does not extend the time.
        assert await store.claim("ann", key, "digest", "resp_2", for_s=9.0) == "resp_1"
    await asyncio.sleep(0.4)
    owners = [await store.claim("ann", key, "digest", "resp_3") for key in ("short", "long", "not shorter")]
    assert owners == ["resp_3", "resp_1", "resp_1"]


async def test_concurrent_duplicates_get_one_response_id(factory: StoreFactory) -> None:
    store = await factory.open()
    owners = await asyncio.gather(*(store.claim("ann", "key", "digest", f"resp_{n}") for n in range(50)))
    assert len(set(owners)) == 1


async def test_secret_is_created_once(factory: StoreFactory) -> None:
    store = await factory.open()
    other = await factory.open() if factory.shared else store
    secrets = await asyncio.gather(*((store, other)[n % 2].secret("salt", bytes([n]) * 32) for n in range(10)))
    assert len(set(secrets)) == 1
    assert await store.secret("pepper", b"p") == b"p"


async def test_counter_counts_each_id_once(factory: StoreFactory) -> None:
    store = await factory.open()
    assert await store.count("ann", "tokens", 5, once="a", for_s=5) == 5
    assert await store.count("ann", "tokens", 5, once="a", for_s=5) == 5
    assert await store.count("bob", "tokens", 1, once="a", for_s=5) == 1
    await asyncio.gather(*(store.count("ann", "tokens", 2, once=f"b{n}", for_s=0.2) for n in range(10)))
    assert await store.count("ann", "tokens", 0, once="c", for_s=0.1) == 25
    await asyncio.sleep(0.25)
    assert await store.count("ann", "tokens", 1, once="d", for_s=5) == 1
