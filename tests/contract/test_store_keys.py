"""Contract of every store for virtual keys."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.contract.state import NOW, fresh
from tests.contract.stores import StoreFactory
from unisono.core.access import KeyDigest, KeyRecord
from unisono.core.budget_period import Period
from unisono.core.quotas import KeyLimits
from unisono.errors import NotFound, StoreConflict


def record(id: str = "", *digests: str) -> KeyRecord:
    key_digests = digests or (fresh("digest"),)
    return KeyRecord(id or fresh("key"), "ann", tuple(map(KeyDigest, key_digests)), NOW)


FULL = KeyRecord(
    id="key_full",
    tenant="ä:}{ *\r\n",
    digests=(KeyDigest("d1"), KeyDigest("d2", NOW + 3600.5)),
    created_at=NOW,
    name="CI „nightly“",
    ending="x-_9",
    expires_at=NOW + 86_400,
    revoked_at=NOW + 1,
    limits=KeyLimits(1, 2, 3, 4, 5_000_000, Period("every", 2_592_000), NOW),
    models=frozenset({"gpt-oss-120b", "openai/*"}),
    mcp_servers=frozenset(),
    tags={"cost centre": "42", "": ""},
    raw=True,
)


async def test_stored_key_is_found_by_id_and_by_each_digest(factory: StoreFactory) -> None:
    store = await factory.open()
    stored = await store.put_key(FULL)
    assert stored == replace(FULL, revision=1)
    assert await store.key(FULL.id) == stored
    assert [await store.key_of(digest.digest) for digest in FULL.digests] == [stored, stored]


async def test_lookup_of_an_unknown_key_is_none(factory: StoreFactory) -> None:
    store = await factory.open()
    await store.put_key(FULL)
    for hostile in ("", "d", "D1", "d1\x00", "*", "key_full", "' OR 1=1 --", "d1\r\nGET t", "x" * 10_000, "🔑"):
        assert await store.key_of(hostile) is None
        assert hostile == FULL.id or await store.key(hostile) is None


async def test_keys_are_listed_oldest_first(factory: StoreFactory) -> None:
    store = await factory.open()
    assert await store.keys() == ()
    created = [await store.put_key(replace(record(), created_at=NOW - number)) for number in range(3)]
    assert await store.keys() == tuple(reversed(created))


async def test_changed_key_is_found_only_by_its_new_digests(factory: StoreFactory) -> None:
    store = await factory.open()
    first = await store.put_key(record("", "before", "always"))
    second = await store.put_key(replace(first, digests=(KeyDigest("always"), KeyDigest("after"))))
    assert second.revision == 2
    assert await store.key_of("before") is None
    assert await store.key_of("always") == await store.key_of("after") == second
    # A removed digest may be used by another key.
    other = await store.put_key(record("", "before"))
    assert await store.key_of("before") == other


async def test_repeated_write_has_no_further_effect(factory: StoreFactory) -> None:
    store = await factory.open()
    new = record()
    assert await store.put_key(new) == await store.put_key(new)
    changed = replace(new, name="other", revision=1)
    assert await store.put_key(changed) == await store.put_key(changed)
    assert (await store.keys())[0].revision == 2


REFUSED = {
    "id in use": (record("key_a", "z"), StoreConflict),
    "digest in use": (record("key_b", "y", "x"), StoreConflict),
    "old revision": (replace(record("key_a", "x"), revision=1), StoreConflict),
    "future revision": (replace(record("key_a", "x"), revision=9), StoreConflict),
    "unknown key": (replace(record("key_c", "z"), revision=1), NotFound),
}


@pytest.mark.parametrize(("change", "error"), REFUSED.values(), ids=REFUSED)
async def test_refused_write_changes_nothing(factory: StoreFactory, change: KeyRecord, error: type[Exception]) -> None:
    store = await factory.open()
    created = await store.put_key(record("key_a", "x"))
    stored = await store.put_key(replace(created, name="newer"))
    with pytest.raises(error):
        await store.put_key(change)
    assert await store.keys() == (stored,)
    assert await store.key_of("x") == stored
    assert await store.key_of("y") is None
    assert await store.key_of("z") is None


async def test_only_one_of_concurrent_changes_succeeds(factory: StoreFactory) -> None:
    store = await factory.open()
    other = await factory.open() if factory.shared else store
    created = await store.put_key(record())
    changes = [each.put_key(replace(created, name=f"{n}")) for n, each in enumerate([store, other] * 5)]
    results = await asyncio.gather(*changes, return_exceptions=True)
    stored = [result for result in results if isinstance(result, KeyRecord)]
    assert len(stored) == 1
    assert all(isinstance(result, KeyRecord | StoreConflict) for result in results)
    assert await store.key(created.id) == stored[0]


async def test_change_is_visible_in_every_store_immediately(factory: StoreFactory) -> None:
    store = await factory.open()
    other = await factory.open() if factory.shared else store
    created = await store.put_key(record("", "shared"))
    assert await other.key_of("shared") == created
    revoked = await other.put_key(replace(created, revoked_at=NOW))
    assert await store.key_of("shared") == revoked
