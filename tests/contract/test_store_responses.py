"""Contract of every store for responses and their event logs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.contract.state import EVERY_ITEM, answered, conversation, fresh, full_response, response, said
from tests.contract.stores import SMALL, StoreFactory
from unisono.core.generation import Usage
from unisono.core.state_store import EventPage, LogWrite, Retention, Status, StoredItem
from unisono.errors import NotFound, StoreConflict, StoreTooLarge, UnisonoError


async def test_stored_response_is_read_unchanged(factory: StoreFactory) -> None:
    store = await factory.open()
    stored = full_response()
    await store.create("ann", stored)
    assert await store.responses("ann", [stored.id]) == (stored,)
    for item in stored.input + stored.output:
        assert await store.item("ann", item.id) == item


async def test_responses_are_returned_in_requested_order_with_gaps(factory: StoreFactory) -> None:
    store = await factory.open()
    first, second = response(), response()
    await store.create("ann", first)
    await store.create("ann", second)
    assert await store.responses("ann", [second.id, "resp_none", first.id]) == (second, None, first)
    assert await store.responses("ann", []) == ()


HOSTILE = ("", "a:b", "a}b", "{a}", "a\x00b", "ä" * 200, "../..", "%7B", "a*", "a\r\nGET b", "x" * 5_000)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("id", HOSTILE, ids=range(len(HOSTILE)))
async def test_unknown_ids_find_nothing(factory: StoreFactory, id: str) -> None:
    store = await factory.open()
    assert await store.responses("ann", [id]) == (None,)
    assert await store.item("ann", id) is None
    assert await store.conversation("ann", id) is None
    assert await store.conversation_items("ann", id) is None
    assert await store.conversation_item("ann", id, id) is None
    assert await store.events("ann", id, 0) is None
    assert await store.tokens("ann", id) == ()
    assert await store.delete_response("ann", id) is False
    assert await store.delete_conversation("ann", id) is False
    assert await store.delete_item("ann", id, id) is False
    assert await store.set_metadata("ann", id, {}) is None


TENANTS = (("ann", "bob"), ("a:b", "a"), ("a", "a:"), ("a}", "a"), ("a%7D", "a}"), ("A", "a"))


@pytest.mark.parametrize(("owner", "other"), TENANTS, ids=[f"{a}-{b}" for a, b in TENANTS])
async def test_state_is_invisible_to_other_tenants(factory: StoreFactory, owner: str, other: str) -> None:
    store = await factory.open()
    stored, chat = response(f"b:{fresh('resp')}"), conversation(f"b:{fresh('conv')}")
    await store.create(owner, stored, log=LogWrite(events=(b"x",), tokens=(1,)))
    await store.create_conversation(owner, chat, [said("hi", "msg_foreign")])
    for id in (stored.id, stored.id.removeprefix("b:")):
        assert await store.responses(other, [id]) == (None,)
        assert await store.events(other, id, 0) is None
        assert await store.tokens(other, id) == ()
        assert await store.delete_response(other, id) is False
    assert await store.item(other, "msg_foreign") is None
    assert await store.item(other, stored.input[0].id) is None
    assert await store.conversation(other, chat.id) is None
    assert await store.conversation_items(other, chat.id) is None
    assert await store.delete_conversation(other, chat.id) is False
    with pytest.raises(NotFound):
        await store.append(other, chat.id, [said("psst")])
    with pytest.raises(NotFound):
        await store.update(other, replace(stored, status=Status.COMPLETED))
    assert await store.responses(owner, [stored.id]) == (stored,)


async def test_update_replaces_output_and_keeps_input(factory: StoreFactory) -> None:
    store = await factory.open()
    in_progress = response()
    await store.create("ann", in_progress)
    done = replace(in_progress, status=Status.COMPLETED, output=(answered("hi"),), usage=Usage(1, 2, 3, 0))
    await store.update("ann", done)
    assert await store.responses("ann", [done.id]) == (done,)
    assert await store.item("ann", done.output[0].id) == done.output[0]


@pytest.mark.parametrize("status", [status for status in Status if status.terminal])
async def test_finished_response_cannot_be_changed(factory: StoreFactory, status: Status) -> None:
    store = await factory.open()
    done = response(status=status)
    await store.create("ann", done)
    for other in (replace(done, notes={"changed": 1}), replace(done, output=(answered("x"),))):
        with pytest.raises(StoreConflict):
            await store.update("ann", other)
    assert await store.responses("ann", [done.id]) == (done,)


async def test_repeated_writes_have_no_further_effect(factory: StoreFactory) -> None:
    store = await factory.open()
    chat = conversation()
    await store.create_conversation("ann", chat)
    in_progress = response(conversation=chat.id)
    done = replace(in_progress, status=Status.COMPLETED, output=(answered("hi"),))
    first_write, last_write = LogWrite(events=(b"0",)), LogWrite(first_event=1, events=(b"1",))
    for _ in range(3):
        await store.create("ann", in_progress, log=first_write)
    for _ in range(3):
        await store.update("ann", done, log=last_write, revision=0)
    assert await store.responses("ann", [done.id]) == (done,)
    assert await store.events("ann", done.id, 0) == EventPage(0, (b"0", b"1"), ended=True)
    assert await store.conversation_items("ann", chat.id) == done.input + done.output
    head = await store.conversation("ann", chat.id)
    assert head is not None
    assert head.revision == 1


async def test_response_id_cannot_be_used_twice(factory: StoreFactory) -> None:
    store = await factory.open()
    first = response()
    await store.create("ann", first)
    with pytest.raises(StoreConflict):
        await store.create("ann", replace(first, model="another"))
    assert await store.responses("ann", [first.id]) == (first,)


async def test_deleting_a_response_deletes_its_items_and_log(factory: StoreFactory) -> None:
    store = await factory.open()
    stored = response()
    lease = await store.acquire("ann", stored.id, "me", 5)
    assert lease
    await store.create("ann", stored, lease=lease, log=LogWrite(events=(b"x",), tokens=(1, 2)))
    assert await store.delete_response("ann", stored.id) is True
    assert await store.delete_response("ann", stored.id) is False
    assert await store.responses("ann", [stored.id]) == (None,)
    assert await store.item("ann", stored.input[0].id) is None
    assert await store.events("ann", stored.id, 0) is None
    assert await store.tokens("ann", stored.id) == ()
    with pytest.raises(NotFound):
        await store.log(lease, stored.id, LogWrite(first_event=1, events=(b"y",)))
    with pytest.raises(NotFound):
        await store.update("ann", replace(stored, status=Status.COMPLETED), lease=lease)


async def test_response_and_its_conversation_are_written_atomically(factory: StoreFactory) -> None:
    store = await factory.open()
    chat = conversation()
    await store.create_conversation("ann", chat, [said("earlier")])
    done = response(status=Status.COMPLETED, conversation=chat.id, output=(answered("hi"),))
    with pytest.raises(StoreConflict):
        await store.create("ann", done, revision=7)
    with pytest.raises(NotFound):
        await store.create("ann", replace(done, conversation="conv_none"), revision=0)
    assert await store.responses("ann", [done.id]) == (None,)
    assert len(await store.conversation_items("ann", chat.id) or ()) == 1
    await store.create("ann", done, revision=0)
    assert await store.responses("ann", [done.id]) == (done,)
    assert (await store.conversation_items("ann", chat.id) or ())[1:] == done.input + done.output
    assert await store.delete_conversation("ann", chat.id)
    assert await store.responses("ann", [done.id]) == (done,)


def large(size: int) -> StoredItem:
    return said("x" * size)


TOO_LARGE = {
    "item": response(input=(said("hi"), large(4_100))),
    "many items": response(input=tuple(large(3_800) for _ in range(6))),
    "request": response(request={"instructions": "x" * 20_000}),
}


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_oversized_response_is_refused_and_not_stored(factory: StoreFactory, name: str) -> None:
    store = await factory.open(bounds=SMALL)
    oversized = TOO_LARGE[name]
    with pytest.raises(StoreTooLarge, match="limit"):
        await store.create("ann", oversized)
    assert await store.responses("ann", [oversized.id]) == (None,)


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_check_refuses_an_oversized_response_before_a_write(factory: StoreFactory, name: str) -> None:
    store = await factory.open(bounds=SMALL)
    with pytest.raises(StoreTooLarge, match="limit") as caught:
        await store.check(TOO_LARGE[name])
    assert caught.value.param == ("input.1" if name == "item" else None)
    small = response(input=(said("hi"),))
    await store.check(small)
    await store.check()
    assert await store.responses("ann", [small.id]) == (None,)
    await store.create("ann", small)
    await store.check(small)


async def test_a_finished_answer_of_any_size_is_stored(factory: StoreFactory) -> None:
    store = await factory.open(bounds=SMALL)
    chat = conversation()
    await store.create_conversation("ann", chat)
    lease = await store.acquire("ann", chat.id, "me", 5)
    running = response(input=(said("hi"),), conversation=chat.id)
    await store.create("ann", running, lease=lease)
    done = replace(running, status=Status.COMPLETED, output=tuple(large(50_000) for _ in range(2)))
    await store.update("ann", done, lease=lease, revision=0)
    assert await store.responses("ann", [done.id]) == (done,)
    assert await store.conversation_items("ann", chat.id) == (*done.input, *done.output)
    whole = response(status=Status.COMPLETED, output=(large(50_000),))
    await store.create("ann", whole)
    assert await store.responses("ann", [whole.id]) == (whole,)
    assert await store.append("ann", chat.id, [large(50_000)], lease=lease) == 2


async def test_check_refuses_input_without_room_in_its_conversation(factory: StoreFactory) -> None:
    store = await factory.open(bounds=SMALL)
    chat = conversation()
    await store.create_conversation("ann", chat, [large(3_000) for _ in range(12)])
    await store.check(response(input=(large(2_000),), conversation=chat.id), "ann")
    with pytest.raises(StoreTooLarge, match="start a new one"):
        await store.check(response(input=(large(3_800),), conversation=chat.id), "ann")


async def test_log_is_read_from_any_position_and_reports_its_end(factory: StoreFactory) -> None:
    store = await factory.open()
    in_progress = response()
    lease = await store.acquire("ann", in_progress.id, "me", 5)
    assert lease
    await store.create("ann", in_progress, lease=lease, log=LogWrite(events=(b"0", b"1")))
    await store.log(lease, in_progress.id, LogWrite(2, (b"2",), 0, (10, 11, 201087)))
    await store.log(lease, in_progress.id, LogWrite(3, (), 3, (12,)))
    assert await store.tokens("ann", in_progress.id) == (10, 11, 201087, 12)
    assert await store.events("ann", in_progress.id, 0) == EventPage(0, (b"0", b"1", b"2"), ended=False)
    assert await store.events("ann", in_progress.id, 3) == EventPage(3, (), ended=False)
    done = replace(in_progress, status=Status.COMPLETED)
    await store.update("ann", done, lease=lease, log=LogWrite(3, (b"\x00\xff\r\n",)))
    assert await store.events("ann", in_progress.id, 0, limit=2) == EventPage(0, (b"0", b"1"), ended=False)
    assert await store.events("ann", in_progress.id, 2, limit=2) == EventPage(2, (b"2", b"\x00\xff\r\n"), ended=True)
    assert await store.events("ann", in_progress.id, 4) == EventPage(4, (), ended=True)
    assert await store.events("ann", in_progress.id, 400, wait_s=5) == EventPage(400, (), ended=True)
    with pytest.raises(StoreConflict):
        await store.log(lease, in_progress.id, LogWrite(4, (b"late",)))


LOG_WRITES: dict[str, tuple[LogWrite, type[UnisonoError] | None]] = {
    "repeated": (LogWrite(1, (b"b", b"c"), 0, (1, 2, 3)), None),
    "repeated and continued": (LogWrite(2, (b"c", b"d")), None),
    "event gap": (LogWrite(4, (b"e",)), StoreConflict),
    "token gap": (LogWrite(3, (b"d",), 4, (5,)), StoreConflict),
    "changed event": (LogWrite(2, (b"x", b"d")), StoreConflict),
    "changed tokens": (LogWrite(3, (b"d",), 0, (1, 9, 3)), StoreConflict),
    "overlapping tokens": (LogWrite(3, (b"d",), 2, (3, 4)), StoreConflict),
    "empty": (LogWrite(), None),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", LOG_WRITES)
async def test_log_accepts_only_repeated_or_consecutive_entries(factory: StoreFactory, name: str) -> None:
    store = await factory.open()
    in_progress = response()
    lease = await store.acquire("ann", in_progress.id, "me", 5)
    assert lease
    await store.create("ann", in_progress, lease=lease, log=LogWrite(0, (b"a", b"b", b"c"), 0, (1, 2, 3)))
    write, error = LOG_WRITES[name]
    if error:
        with pytest.raises(error):
            await store.log(lease, in_progress.id, write)
        assert await store.events("ann", in_progress.id, 0) == EventPage(0, (b"a", b"b", b"c"))
        assert await store.tokens("ann", in_progress.id) == (1, 2, 3)
    else:
        await store.log(lease, in_progress.id, write)
        page = await store.events("ann", in_progress.id, 0)
        assert page is not None
        assert page.events[:3] == (b"a", b"b", b"c")
        assert page.events[3:] in ((), (b"d",))


async def test_waiting_reader_gets_every_event_and_the_end(factory: StoreFactory) -> None:
    writer = await factory.open()
    reader = await factory.open() if factory.shared else writer
    in_progress = response()
    lease = await writer.acquire("ann", in_progress.id, "me", 30)
    assert lease
    await writer.create("ann", in_progress, lease=lease, log=LogWrite(events=(b"0",)))
    received: list[bytes] = []

    async def follow() -> None:
        while True:
            page = await reader.events("ann", in_progress.id, len(received), wait_s=10)
            assert page is not None
            received.extend(page.events)
            if page.ended:
                return

    readers = [asyncio.create_task(follow())]
    for number in range(1, 6):
        await asyncio.sleep(0.03)
        await writer.log(lease, in_progress.id, LogWrite(number, (b"%d" % number,)))
    await asyncio.sleep(0.03)
    await writer.update("ann", replace(in_progress, status=Status.COMPLETED), lease=lease)
    await asyncio.wait_for(asyncio.gather(*readers), 5)
    assert received == [b"%d" % number for number in range(6)]


async def test_reader_waits_at_most_the_given_time(factory: StoreFactory) -> None:
    store = await factory.open()
    in_progress = response()
    await store.create("ann", in_progress, log=LogWrite(events=(b"0",)))
    started = asyncio.get_running_loop().time()
    assert await store.events("ann", in_progress.id, 1, wait_s=0.2) == EventPage(1)
    assert 0.15 < asyncio.get_running_loop().time() - started < 1.0


@pytest.mark.slow
async def test_state_expires_after_its_retention_time(factory: StoreFactory) -> None:
    store = await factory.open(Retention(response_s=0.6, conversation_s=0.6, log_s=0.2, key_s=0.2))
    chat = conversation()
    await store.create_conversation("ann", chat, EVERY_ITEM)
    done = response(status=Status.COMPLETED)
    await store.create("ann", done, log=LogWrite(events=(b"0",), tokens=(1,)))
    assert await store.claim("ann", "key", "digest", done.id) == done.id
    await asyncio.sleep(0.3)
    assert await store.events("ann", done.id, 0) is None
    assert await store.tokens("ann", done.id) == ()
    assert await store.claim("ann", "key", "another digest", "resp_other") == "resp_other"
    assert await store.responses("ann", [done.id]) == (done,)
    assert await store.append("ann", chat.id, [said("still here")]) == 1
    await asyncio.sleep(0.4)
    assert await store.responses("ann", [done.id]) == (None,)
    assert await store.item("ann", done.input[0].id) is None
    assert await store.conversation("ann", chat.id) is not None
    await asyncio.sleep(0.4)
    assert await store.conversation("ann", chat.id) is None
    assert await store.conversation_items("ann", chat.id) is None
    replacement = replace(done, model="another")
    await store.create("ann", replacement)
    assert await store.responses("ann", [done.id]) == (replacement,)
    await store.create_conversation("ann", chat)
    assert await store.conversation_items("ann", chat.id) == ()


@pytest.mark.slow
@pytest.mark.parametrize("in_conversation", [False, True], ids=["chain", "branch of a conversation"])
async def test_a_new_response_renews_the_responses_that_it_continues(
    factory: StoreFactory, in_conversation: bool
) -> None:
    store = await factory.open(Retention(response_s=1.0, conversation_s=1.0))
    chat = conversation()
    await store.create_conversation("ann", chat, EVERY_ITEM)
    first = response(status=Status.COMPLETED, conversation=chat.id if in_conversation else None)
    chain, other = [first], replace(first, id=response().id, input=(said("alone"),))
    for one in (first, other):
        await store.create("ann", one)
    for _ in range(3):
        await asyncio.sleep(0.6)
        ancestors = tuple(one.id for one in chain)
        chain.append(response(status=Status.COMPLETED, input=(said("more"),), ancestors=ancestors))
        await store.create("ann", chain[-1])
        assert await store.responses("ann", [one.id for one in chain]) == tuple(chain)
        assert await store.item("ann", first.input[0].id) == first.input[0]
    assert await store.responses("ann", [other.id]) == (None,)
    assert (await store.conversation_items("ann", chat.id) == EVERY_ITEM) is in_conversation
    await asyncio.sleep(1.2)
    assert await store.responses("ann", [one.id for one in chain]) == (None,) * 4


@pytest.mark.slow
@pytest.mark.parametrize("in_conversation", [False, True], ids=["alone", "in a conversation"])
async def test_a_running_response_and_its_conversation_do_not_expire(
    factory: StoreFactory, in_conversation: bool
) -> None:
    store = await factory.open(Retention(response_s=1.0, conversation_s=1.0))
    chat = conversation()
    await store.create_conversation("ann", chat, EVERY_ITEM)
    running = response(conversation=chat.id if in_conversation else None)
    await asyncio.sleep(0.6)
    lease = await store.acquire("ann", running.anchor, f"a:0:{running.id}", 5, reserve_s=5)
    assert lease
    await asyncio.sleep(0.6)
    await store.create("ann", running, lease=lease, log=LogWrite(events=(b"0",)))
    for number in range(1, 4):
        assert await store.renew(lease, 5)
        await asyncio.sleep(0.6)
        await store.log(lease, running.id, LogWrite(number, (b"1",)))
    assert await store.responses("ann", [running.id]) == (running,)
    assert await store.events("ann", running.id, 3) == EventPage(3, (b"1",))
    assert (await store.conversation_items("ann", chat.id) == EVERY_ITEM) is in_conversation


@pytest.mark.slow
async def test_the_check_before_a_response_renews_the_responses_that_it_continues(factory: StoreFactory) -> None:
    store = await factory.open(Retention(response_s=1.0, conversation_s=1.0))
    first = response(status=Status.COMPLETED)
    await store.create("ann", first)
    await asyncio.sleep(0.6)
    await store.check(response(ancestors=(first.id,)), "ann")
    await asyncio.sleep(0.6)
    assert await store.responses("ann", [first.id]) == (first,)


async def test_a_deleted_ancestor_stays_deleted(factory: StoreFactory) -> None:
    store = await factory.open()
    first = response(status=Status.COMPLETED)
    await store.create("ann", first)
    assert await store.delete_response("ann", first.id)
    second = response(status=Status.COMPLETED, input=(said("more"),), ancestors=(first.id,))
    await store.create("ann", second)
    assert await store.responses("ann", [first.id, second.id]) == (None, second)


async def test_new_owner_can_check_that_the_log_is_complete(factory: StoreFactory) -> None:
    store = await factory.open()
    in_progress = response()
    first = await store.acquire("ann", in_progress.id, "a:resp_1", 60)
    assert first
    await store.create("ann", in_progress, lease=first, log=LogWrite(events=(b"0",), tokens=(7,)))
    second = await store.acquire("ann", in_progress.id, "b:resp_1", 60, force=True)
    assert second
    assert await store.is_log_complete(second, in_progress.id) is True
    with pytest.raises(StoreConflict):
        await store.is_log_complete(first, in_progress.id)
    with pytest.raises(NotFound):
        await store.is_log_complete(second, "resp_none")


POSITIONS = {"events": LogWrite(2, (), 1), "tokens": LogWrite(1, (), 2), "both": LogWrite(5, (), 5)}


@pytest.mark.parametrize("write", POSITIONS.values(), ids=POSITIONS)
async def test_write_beyond_the_log_end_conflicts_even_without_content(factory: StoreFactory, write: LogWrite) -> None:
    store = await factory.open()
    in_progress = response()
    lease = await store.acquire("ann", in_progress.id, "me", 60)
    assert lease
    await store.create("ann", in_progress, lease=lease, log=LogWrite(events=(b"0",), tokens=(7,)))
    await store.log(lease, in_progress.id, LogWrite(1, (), 1))
    with pytest.raises(StoreConflict):
        await store.log(lease, in_progress.id, write)
    assert await store.events("ann", in_progress.id, 0) == EventPage(0, (b"0",))
