"""Contract of every store for recordings of answers."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.state import NOW, fresh
from tests.contract.stores import StoreFactory
from unisono.core.recordings import StoredTrace

LONG_S = 3600.0
ODD = ("req_1", "ä:}{ *\r\n", "req \x00 1", "' OR 1=1 --", "🔑")


def recording(tenant: str = "ann", id: str = "", document: bytes = b"\x00\xff{}") -> StoredTrace:
    return StoredTrace(tenant, id or fresh("req"), NOW, b'{"a": 1}', document)


async def test_stored_recording_is_read_unchanged(factory: StoreFactory) -> None:
    store = await factory.open()
    recordings = [recording(tenant, id) for tenant in ("ann", "ä:}{ *\r\n") for id in ODD]
    await store.keep_traces(*recordings, for_s=LONG_S, most=100)
    for stored in recordings:
        assert await store.trace(stored.tenant, stored.id) == stored


async def test_recordings_are_listed_newest_first_without_documents(factory: StoreFactory) -> None:
    store = await factory.open()
    assert await store.traces("ann") == ()
    for number in range(5):
        await store.keep_traces(recording(id=f"req_{number}"), for_s=LONG_S, most=100)
    assert [stored.id for stored in await store.traces("ann", 3)] == ["req_4", "req_3", "req_2"]
    assert await store.traces("ann", 1) == (StoredTrace("ann", "req_4", NOW, b'{"a": 1}'),)


@pytest.mark.parametrize("other", ["ben", "", "an", "annn", "ann:traces", "*"])
async def test_recording_is_invisible_to_other_tenants(other: str, factory: StoreFactory) -> None:
    store = await factory.open()
    await store.keep_traces(recording(id="req_1"), for_s=LONG_S, most=100)
    assert await store.trace(other, "req_1") is None
    assert await store.traces(other) == ()
    assert await store.trace("ann", "req_2") is None


async def test_only_the_newest_recordings_of_a_tenant_are_stored(factory: StoreFactory) -> None:
    store = await factory.open()
    await store.keep_traces(recording("ben", "req_0"), for_s=LONG_S, most=2)
    for number in range(4):
        await store.keep_traces(recording(id=f"req_{number}"), for_s=LONG_S, most=2)
    await store.keep_traces(*(recording("cid", f"req_{number}") for number in range(4)), for_s=LONG_S, most=2)
    for tenant, ids in (("ann", ["req_3", "req_2"]), ("ben", ["req_0"]), ("cid", ["req_3", "req_2"])):
        assert [stored.id for stored in await store.traces(tenant)] == ids
    assert await store.trace("ann", "req_1") is None


async def test_recordings_of_different_sizes_stored_together_stay_in_order(factory: StoreFactory) -> None:
    store = await factory.open()
    recordings = [
        recording(id=f"req_{n}", document=b"%d" % n * size) for n, size in enumerate((1, 300_000, 2, 3, 200_000))
    ]
    await store.keep_traces(*recordings, for_s=LONG_S, most=4)
    assert [stored.id for stored in await store.traces("ann")] == ["req_4", "req_3", "req_2", "req_1"]
    for stored in recordings[1:]:
        assert await store.trace("ann", stored.id) == stored


async def test_recording_replaces_an_earlier_one_with_the_same_id(factory: StoreFactory) -> None:
    store = await factory.open()
    await store.keep_traces(recording(id="req_1", document=b"1"), recording(id="req_2"), for_s=LONG_S, most=2)
    newer = recording(id="req_1", document=b"2")
    await store.keep_traces(newer, for_s=LONG_S, most=2)
    await store.keep_traces(newer, for_s=LONG_S, most=2)
    assert await store.trace("ann", "req_1") == newer
    assert [stored.id for stored in await store.traces("ann")] == ["req_1", "req_2"]


async def test_recording_expires_without_affecting_others(factory: StoreFactory) -> None:
    store = await factory.open()
    await store.keep_traces(recording(id="req_1"), for_s=LONG_S, most=100)
    await store.keep_traces(recording(id="req_2"), for_s=0.05, most=100)
    while await store.trace("ann", "req_2") is not None:
        await asyncio.sleep(0.01)
    assert [stored.id for stored in await store.traces("ann")] == ["req_1"]
    await store.keep_traces(recording(id="req_3"), for_s=LONG_S, most=100)
    assert [stored.id for stored in await store.traces("ann")] == ["req_3", "req_1"]
