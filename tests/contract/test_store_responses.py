"""Responses and their logs, as every store must keep them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.contract.state import EVERY_ITEM, answered, conversation, fresh, full_response, response, said
from tests.contract.stores import SMALL, Home
from unisono.core.generation import Usage
from unisono.core.state_store import EventPage, LogWrite, Retention, Status, StoredItem
from unisono.errors import NotFound, StoreConflict, StoreTooLarge, UnisonoError


async def test_a_response_comes_back_as_it_was_kept(home: Home) -> None:
    store = await home.open()
    kept = full_response()
    await store.create("ann", kept)
    assert await store.responses("ann", [kept.id]) == (kept,)
    for item in kept.input + kept.output:
        assert await store.item("ann", item.id) == item


async def test_responses_come_in_the_order_asked_with_gaps(home: Home) -> None:
    store = await home.open()
    first, second = response(), response()
    await store.create("ann", first)
    await store.create("ann", second)
    assert await store.responses("ann", [second.id, "resp_none", first.id]) == (second, None, first)
    assert await store.responses("ann", []) == ()


HOSTILE = ("", "a:b", "a}b", "{a}", "a\x00b", "ä" * 200, "../..", "%7B", "a*", "a\r\nGET b", "x" * 5_000)


@pytest.mark.parametrize("id", HOSTILE, ids=range(len(HOSTILE)))
async def test_ids_that_nobody_made_find_nothing(home: Home, id: str) -> None:
    store = await home.open()
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
async def test_what_is_another_tenants_is_not_there(home: Home, owner: str, other: str) -> None:
    store = await home.open()
    held, talk = response(f"b:{fresh('resp')}"), conversation(f"b:{fresh('conv')}")
    await store.create(owner, held, log=LogWrite(events=(b"x",), tokens=(1,)))
    await store.create_conversation(owner, talk, [said("hi", "msg_foreign")])
    for id in (held.id, held.id.removeprefix("b:")):
        assert await store.responses(other, [id]) == (None,)
        assert await store.events(other, id, 0) is None
        assert await store.tokens(other, id) == ()
        assert await store.delete_response(other, id) is False
    assert await store.item(other, "msg_foreign") is None
    assert await store.item(other, held.input[0].id) is None
    assert await store.conversation(other, talk.id) is None
    assert await store.conversation_items(other, talk.id) is None
    assert await store.delete_conversation(other, talk.id) is False
    with pytest.raises(NotFound):
        await store.append(other, talk.id, [said("psst")])
    with pytest.raises(NotFound):
        await store.update(other, replace(held, status=Status.COMPLETED))
    assert await store.responses(owner, [held.id]) == (held,)


async def test_an_update_replaces_what_changes_and_keeps_the_input(home: Home) -> None:
    store = await home.open()
    running = response()
    await store.create("ann", running)
    done = replace(running, status=Status.COMPLETED, output=(answered("hi"),), usage=Usage(1, 2, 3, 0))
    await store.update("ann", done)
    assert await store.responses("ann", [done.id]) == (done,)
    assert await store.item("ann", done.output[0].id) == done.output[0]


@pytest.mark.parametrize("status", [status for status in Status if status.terminal])
async def test_what_is_finished_never_changes(home: Home, status: Status) -> None:
    store = await home.open()
    done = response(status=status)
    await store.create("ann", done)
    for other in (replace(done, notes={"changed": 1}), replace(done, output=(answered("x"),))):
        with pytest.raises(StoreConflict):
            await store.update("ann", other)
    assert await store.responses("ann", [done.id]) == (done,)


async def test_the_same_write_again_is_done_once(home: Home) -> None:
    store = await home.open()
    talk = conversation()
    await store.create_conversation("ann", talk)
    running = response(conversation=talk.id)
    done = replace(running, status=Status.COMPLETED, output=(answered("hi"),))
    beginning, end = LogWrite(events=(b"0",)), LogWrite(first_event=1, events=(b"1",))
    for _ in range(3):
        await store.create("ann", running, log=beginning)
    for _ in range(3):
        await store.update("ann", done, log=end, revision=0)
    assert await store.responses("ann", [done.id]) == (done,)
    assert await store.events("ann", done.id, 0) == EventPage(0, (b"0", b"1"), ended=True)
    assert await store.conversation_items("ann", talk.id) == done.input + done.output
    head = await store.conversation("ann", talk.id)
    assert head is not None
    assert head.revision == 1


async def test_an_id_is_given_once(home: Home) -> None:
    store = await home.open()
    first = response()
    await store.create("ann", first)
    with pytest.raises(StoreConflict):
        await store.create("ann", replace(first, model="another"))
    assert await store.responses("ann", [first.id]) == (first,)


async def test_a_deleted_response_is_gone_with_all_that_was_its_own(home: Home) -> None:
    store = await home.open()
    kept = response()
    lease = await store.acquire("ann", kept.id, "me", 5)
    assert lease
    await store.create("ann", kept, lease=lease, log=LogWrite(events=(b"x",), tokens=(1, 2)))
    assert await store.delete_response("ann", kept.id) is True
    assert await store.delete_response("ann", kept.id) is False
    assert await store.responses("ann", [kept.id]) == (None,)
    assert await store.item("ann", kept.input[0].id) is None
    assert await store.events("ann", kept.id, 0) is None
    assert await store.tokens("ann", kept.id) == ()
    with pytest.raises(NotFound):
        await store.log(lease, kept.id, LogWrite(first_event=1, events=(b"y",)))
    with pytest.raises(NotFound):
        await store.update("ann", replace(kept, status=Status.COMPLETED), lease=lease)


async def test_a_response_of_a_conversation_is_kept_with_it_or_not_at_all(home: Home) -> None:
    store = await home.open()
    talk = conversation()
    await store.create_conversation("ann", talk, [said("earlier")])
    done = response(status=Status.COMPLETED, conversation=talk.id, output=(answered("hi"),))
    with pytest.raises(StoreConflict):
        await store.create("ann", done, revision=7)
    with pytest.raises(NotFound):
        await store.create("ann", replace(done, conversation="conv_none"), revision=0)
    assert await store.responses("ann", [done.id]) == (None,)
    assert len(await store.conversation_items("ann", talk.id) or ()) == 1
    await store.create("ann", done, revision=0)
    assert await store.responses("ann", [done.id]) == (done,)
    assert (await store.conversation_items("ann", talk.id) or ())[1:] == done.input + done.output
    assert await store.delete_conversation("ann", talk.id)
    assert await store.responses("ann", [done.id]) == (done,)


def large(size: int) -> StoredItem:
    return said("x" * size)


TOO_LARGE = {
    "an item": response(input=(large(4_100),)),
    "many items": response(input=tuple(large(3_800) for _ in range(6))),
    "input and output": response(
        status=Status.COMPLETED, input=(large(3_800),) * 3, output=tuple(large(3_800) for _ in range(3))
    ),
    "the request": response(request={"instructions": "x" * 20_000}),
}


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_what_is_too_large_is_refused_and_leaves_nothing(home: Home, name: str) -> None:
    store = await home.open(bounds=SMALL)
    huge = TOO_LARGE[name]
    with pytest.raises(StoreTooLarge, match="limit"):
        await store.create("ann", huge)
    assert await store.responses("ann", [huge.id]) == (None,)


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_what_is_too_large_is_known_before_anything_is_written(home: Home, name: str) -> None:
    store = await home.open(bounds=SMALL)
    with pytest.raises(StoreTooLarge, match="limit"):
        await store.check(TOO_LARGE[name])
    small = response(input=(said("hi"),))
    await store.check(small)
    await store.check()
    assert await store.responses("ann", [small.id]) == (None,)
    await store.create("ann", small)
    await store.check(small)


async def test_a_log_is_read_from_anywhere_and_knows_its_end(home: Home) -> None:
    store = await home.open()
    running = response()
    lease = await store.acquire("ann", running.id, "me", 5)
    assert lease
    await store.create("ann", running, lease=lease, log=LogWrite(events=(b"0", b"1")))
    await store.log(lease, running.id, LogWrite(2, (b"2",), 0, (10, 11, 201087)))
    await store.log(lease, running.id, LogWrite(3, (), 3, (12,)))
    assert await store.tokens("ann", running.id) == (10, 11, 201087, 12)
    assert await store.events("ann", running.id, 0) == EventPage(0, (b"0", b"1", b"2"), ended=False)
    assert await store.events("ann", running.id, 3) == EventPage(3, (), ended=False)
    done = replace(running, status=Status.COMPLETED)
    await store.update("ann", done, lease=lease, log=LogWrite(3, (b"\x00\xff\r\n",)))
    assert await store.events("ann", running.id, 0, limit=2) == EventPage(0, (b"0", b"1"), ended=False)
    assert await store.events("ann", running.id, 2, limit=2) == EventPage(2, (b"2", b"\x00\xff\r\n"), ended=True)
    assert await store.events("ann", running.id, 4) == EventPage(4, (), ended=True)
    assert await store.events("ann", running.id, 400, wait_s=5) == EventPage(400, (), ended=True)
    with pytest.raises(StoreConflict):
        await store.log(lease, running.id, LogWrite(4, (b"late",)))


LOG_WRITES: dict[str, tuple[LogWrite, type[UnisonoError] | None]] = {
    "the same again": (LogWrite(1, (b"b", b"c"), 0, (1, 2, 3)), None),
    "the same and more": (LogWrite(2, (b"c", b"d")), None),
    "an event gap": (LogWrite(4, (b"e",)), StoreConflict),
    "a token gap": (LogWrite(3, (b"d",), 4, (5,)), StoreConflict),
    "another event": (LogWrite(2, (b"x", b"d")), StoreConflict),
    "other tokens": (LogWrite(3, (b"d",), 0, (1, 9, 3)), StoreConflict),
    "tokens that overlap": (LogWrite(3, (b"d",), 2, (3, 4)), StoreConflict),
    "nothing": (LogWrite(), None),
}


@pytest.mark.parametrize("name", LOG_WRITES)
async def test_a_log_takes_what_follows_and_what_it_has_already(home: Home, name: str) -> None:
    store = await home.open()
    running = response()
    lease = await store.acquire("ann", running.id, "me", 5)
    assert lease
    await store.create("ann", running, lease=lease, log=LogWrite(0, (b"a", b"b", b"c"), 0, (1, 2, 3)))
    write, refused = LOG_WRITES[name]
    if refused:
        with pytest.raises(refused):
            await store.log(lease, running.id, write)
        assert await store.events("ann", running.id, 0) == EventPage(0, (b"a", b"b", b"c"))
        assert await store.tokens("ann", running.id) == (1, 2, 3)
    else:
        await store.log(lease, running.id, write)
        page = await store.events("ann", running.id, 0)
        assert page is not None
        assert page.events[:3] == (b"a", b"b", b"c")
        assert page.events[3:] in ((), (b"d",))


async def test_a_reader_that_waits_is_woken_by_every_write_and_by_the_end(home: Home) -> None:
    writer = await home.open()
    reader = await home.open() if home.shared else writer
    running = response()
    lease = await writer.acquire("ann", running.id, "me", 30)
    assert lease
    await writer.create("ann", running, lease=lease, log=LogWrite(events=(b"0",)))
    seen: list[bytes] = []

    async def follow() -> None:
        while True:
            page = await reader.events("ann", running.id, len(seen), wait_s=10)
            assert page is not None
            seen.extend(page.events)
            if page.ended:
                return

    readers = [asyncio.create_task(follow())]
    for number in range(1, 6):
        await asyncio.sleep(0.03)
        await writer.log(lease, running.id, LogWrite(number, (b"%d" % number,)))
    await asyncio.sleep(0.03)
    await writer.update("ann", replace(running, status=Status.COMPLETED), lease=lease)
    await asyncio.wait_for(asyncio.gather(*readers), 5)
    assert seen == [b"%d" % number for number in range(6)]


async def test_a_reader_waits_no_longer_than_it_said(home: Home) -> None:
    store = await home.open()
    running = response()
    await store.create("ann", running, log=LogWrite(events=(b"0",)))
    begun = asyncio.get_running_loop().time()
    assert await store.events("ann", running.id, 1, wait_s=0.2) == EventPage(1)
    assert 0.15 < asyncio.get_running_loop().time() - begun < 1.0


@pytest.mark.slow
async def test_what_is_past_its_time_is_gone(home: Home) -> None:
    store = await home.open(Retention(response_s=0.6, conversation_s=0.6, log_s=0.2, key_s=0.2))
    talk = conversation()
    await store.create_conversation("ann", talk, EVERY_ITEM)
    done = response(status=Status.COMPLETED)
    await store.create("ann", done, log=LogWrite(events=(b"0",), tokens=(1,)))
    assert await store.claim("ann", "key", "digest", done.id) == done.id
    await asyncio.sleep(0.3)
    assert await store.events("ann", done.id, 0) is None
    assert await store.tokens("ann", done.id) == ()
    assert await store.claim("ann", "key", "another digest", "resp_other") == "resp_other"
    assert await store.responses("ann", [done.id]) == (done,)
    assert await store.append("ann", talk.id, [said("still here")]) == 1
    await asyncio.sleep(0.4)
    assert await store.responses("ann", [done.id]) == (None,)
    assert await store.item("ann", done.input[0].id) is None
    assert await store.conversation("ann", talk.id) is not None
    await asyncio.sleep(0.4)
    assert await store.conversation("ann", talk.id) is None
    assert await store.conversation_items("ann", talk.id) is None
    again = replace(done, model="another")
    await store.create("ann", again)
    assert await store.responses("ann", [done.id]) == (again,)
    await store.create_conversation("ann", talk)
    assert await store.conversation_items("ann", talk.id) == ()


async def test_a_new_owner_finds_the_log_complete(home: Home) -> None:
    store = await home.open()
    running = response()
    first = await store.acquire("ann", running.id, "first", 60)
    assert first
    await store.create("ann", running, lease=first, log=LogWrite(events=(b"0",), tokens=(7,)))
    second = await store.acquire("ann", running.id, "second", 60, force=True)
    assert second
    assert await store.is_log_complete(second, running.id) is True
    with pytest.raises(StoreConflict):
        await store.is_log_complete(first, running.id)
    with pytest.raises(NotFound):
        await store.is_log_complete(second, "resp_none")


POSITIONS = {"events": LogWrite(2, (), 1), "tokens": LogWrite(1, (), 2), "both": LogWrite(5, (), 5)}


@pytest.mark.parametrize("write", POSITIONS.values(), ids=POSITIONS)
async def test_a_log_that_ends_too_early_is_noticed_without_content(home: Home, write: LogWrite) -> None:
    store = await home.open()
    running = response()
    lease = await store.acquire("ann", running.id, "me", 60)
    assert lease
    await store.create("ann", running, lease=lease, log=LogWrite(events=(b"0",), tokens=(7,)))
    await store.log(lease, running.id, LogWrite(1, (), 1))
    with pytest.raises(StoreConflict):
        await store.log(lease, running.id, write)
    assert await store.events("ann", running.id, 0) == EventPage(0, (b"0",))
