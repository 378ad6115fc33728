"""Virtual keys, as every store must keep them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.contract.state import NOW, fresh
from tests.contract.stores import Home
from unisono.core.access import KeyDigest, KeyLimits, KeyRecord, Period
from unisono.errors import NotFound, StoreConflict


def record(id: str = "", *digests: str) -> KeyRecord:
    held = digests or (fresh("digest"),)
    return KeyRecord(id or fresh("key"), "ann", tuple(map(KeyDigest, held)), NOW)


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


async def test_a_key_comes_back_as_it_was_kept_and_is_found_by_each_of_its_digests(home: Home) -> None:
    store = await home.open()
    kept = await store.put_key(FULL)
    assert kept == replace(FULL, revision=1)
    assert await store.key(FULL.id) == kept
    assert [await store.key_of(one.digest) for one in FULL.digests] == [kept, kept]


async def test_what_is_not_there_is_none(home: Home) -> None:
    store = await home.open()
    await store.put_key(FULL)
    for hostile in ("", "d", "D1", "d1\x00", "*", "key_full", "' OR 1=1 --", "d1\r\nGET t", "x" * 10_000, "🔑"):
        assert await store.key_of(hostile) is None
        assert hostile == FULL.id or await store.key(hostile) is None


async def test_all_keys_are_listed_the_oldest_first(home: Home) -> None:
    store = await home.open()
    assert await store.keys() == ()
    made = [await store.put_key(replace(record(), created_at=NOW - number)) for number in range(3)]
    assert await store.keys() == tuple(reversed(made))


async def test_a_changed_key_is_found_by_its_new_digests_only(home: Home) -> None:
    store = await home.open()
    first = await store.put_key(record("", "before", "always"))
    second = await store.put_key(replace(first, digests=(KeyDigest("always"), KeyDigest("after"))))
    assert second.revision == 2
    assert await store.key_of("before") is None
    assert await store.key_of("always") == await store.key_of("after") == second
    # A digest that was given up is anybody's.
    other = await store.put_key(record("", "before"))
    assert await store.key_of("before") == other


async def test_a_write_that_is_repeated_is_done_once(home: Home) -> None:
    store = await home.open()
    new = record()
    assert await store.put_key(new) == await store.put_key(new)
    changed = replace(new, name="other", revision=1)
    assert await store.put_key(changed) == await store.put_key(changed)
    assert (await store.keys())[0].revision == 2


REFUSED = {
    "another key has the id": (record("key_a", "z"), StoreConflict),
    "another key has the digest": (record("key_b", "y", "x"), StoreConflict),
    "changed meanwhile": (replace(record("key_a", "x"), revision=1), StoreConflict),
    "from the future": (replace(record("key_a", "x"), revision=9), StoreConflict),
    "no such key": (replace(record("key_c", "z"), revision=1), NotFound),
}


@pytest.mark.parametrize(("change", "error"), REFUSED.values(), ids=REFUSED)
async def test_a_write_that_is_refused_leaves_nothing_behind(
    home: Home, change: KeyRecord, error: type[Exception]
) -> None:
    store = await home.open()
    made = await store.put_key(record("key_a", "x"))
    kept = await store.put_key(replace(made, name="newer"))
    with pytest.raises(error):
        await store.put_key(change)
    assert await store.keys() == (kept,)
    assert await store.key_of("x") == kept
    assert await store.key_of("y") is None
    assert await store.key_of("z") is None


async def test_of_two_changes_at_once_one_is_refused(home: Home) -> None:
    store = await home.open()
    other = await home.open() if home.shared else store
    made = await store.put_key(record())
    changes = [each.put_key(replace(made, name=f"{n}")) for n, each in enumerate([store, other] * 5)]
    answers = await asyncio.gather(*changes, return_exceptions=True)
    kept = [answer for answer in answers if isinstance(answer, KeyRecord)]
    assert len(kept) == 1
    assert all(isinstance(answer, KeyRecord | StoreConflict) for answer in answers)
    assert await store.key(made.id) == kept[0]


async def test_a_change_is_seen_through_every_store_at_once(home: Home) -> None:
    store = await home.open()
    other = await home.open() if home.shared else store
    made = await store.put_key(record("", "shared"))
    assert await other.key_of("shared") == made
    revoked = await other.put_key(replace(made, revoked_at=NOW))
    assert await store.key_of("shared") == revoked
