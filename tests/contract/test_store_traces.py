"""Recordings of answers, as every store must keep them."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.state import NOW, fresh
from tests.contract.stores import Home
from unisono.core.recordings import StoredTrace

LONG_S = 3600.0
ODD = ("req_1", "ä:}{ *\r\n", "req \x00 1", "' OR 1=1 --", "🔑")


def recording(tenant: str = "ann", id: str = "", document: bytes = b"\x00\xff{}") -> StoredTrace:
    return StoredTrace(tenant, id or fresh("req"), NOW, b'{"a": 1}', document)


async def test_a_recording_comes_back_as_it_was_kept(home: Home) -> None:
    store = await home.open()
    kept = [recording(tenant, id) for tenant in ("ann", "ä:}{ *\r\n") for id in ODD]
    await store.keep_traces(*kept, for_s=LONG_S, most=100)
    for one in kept:
        assert await store.trace(one.tenant, one.id) == one


async def test_recordings_are_listed_without_documents_the_newest_first(home: Home) -> None:
    store = await home.open()
    assert await store.traces("ann") == ()
    for number in range(5):
        await store.keep_traces(recording(id=f"req_{number}"), for_s=LONG_S, most=100)
    assert [one.id for one in await store.traces("ann", 3)] == ["req_4", "req_3", "req_2"]
    assert await store.traces("ann", 1) == (StoredTrace("ann", "req_4", NOW, b'{"a": 1}'),)


@pytest.mark.parametrize("other", ["ben", "", "an", "annn", "ann:traces", "*"])
async def test_another_tenants_recording_is_not_there(other: str, home: Home) -> None:
    store = await home.open()
    await store.keep_traces(recording(id="req_1"), for_s=LONG_S, most=100)
    assert await store.trace(other, "req_1") is None
    assert await store.traces(other) == ()
    assert await store.trace("ann", "req_2") is None


async def test_of_each_tenant_only_the_last_ones_are_kept(home: Home) -> None:
    store = await home.open()
    await store.keep_traces(recording("ben", "req_0"), for_s=LONG_S, most=2)
    for number in range(4):
        await store.keep_traces(recording(id=f"req_{number}"), for_s=LONG_S, most=2)
    await store.keep_traces(*(recording("cid", f"req_{number}") for number in range(4)), for_s=LONG_S, most=2)
    for tenant, ids in (("ann", ["req_3", "req_2"]), ("ben", ["req_0"]), ("cid", ["req_3", "req_2"])):
        assert [one.id for one in await store.traces(tenant)] == ids
    assert await store.trace("ann", "req_1") is None


async def test_long_and_short_ones_that_are_kept_together_stay_in_their_order(home: Home) -> None:
    store = await home.open()
    kept = [recording(id=f"req_{n}", document=b"%d" % n * size) for n, size in enumerate((1, 300_000, 2, 3, 200_000))]
    await store.keep_traces(*kept, for_s=LONG_S, most=4)
    assert [one.id for one in await store.traces("ann")] == ["req_4", "req_3", "req_2", "req_1"]
    for one in kept[1:]:
        assert await store.trace("ann", one.id) == one


async def test_one_of_the_same_id_takes_the_place_of_the_one_before(home: Home) -> None:
    store = await home.open()
    await store.keep_traces(recording(id="req_1", document=b"1"), recording(id="req_2"), for_s=LONG_S, most=2)
    again = recording(id="req_1", document=b"2")
    await store.keep_traces(again, for_s=LONG_S, most=2)
    await store.keep_traces(again, for_s=LONG_S, most=2)
    assert await store.trace("ann", "req_1") == again
    assert [one.id for one in await store.traces("ann")] == ["req_1", "req_2"]


async def test_a_recording_is_gone_after_its_time_and_those_beside_it_are_not(home: Home) -> None:
    store = await home.open()
    await store.keep_traces(recording(id="req_1"), for_s=LONG_S, most=100)
    await store.keep_traces(recording(id="req_2"), for_s=0.05, most=100)
    while await store.trace("ann", "req_2") is not None:
        await asyncio.sleep(0.01)
    assert [one.id for one in await store.traces("ann")] == ["req_1"]
    await store.keep_traces(recording(id="req_3"), for_s=LONG_S, most=100)
    assert [one.id for one in await store.traces("ann")] == ["req_3", "req_1"]
