"""Contract of every store for the directory and the audit records."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.contract.state import NOW, fresh
from tests.contract.stores import StoreFactory
from unisono.core.access import KeyDigest, KeyRecord
from unisono.core.budget_period import Period
from unisono.core.directory import AuditRecord, DirectoryEntry, EntryKind
from unisono.core.quotas import KeyLimits
from unisono.errors import NotFound, StoreConflict

FULL = DirectoryEntry(
    kind=EntryKind.TEAM,
    id="team ä:}{ *\r\n",
    created_at=NOW,
    updated_at=NOW + 1,
    alias="Team „A“",
    email="a@example.org",
    role="internal_user",
    limits=KeyLimits(1, 2, 3, 4, 5_000_000, Period("month"), NOW),
    models=frozenset({"gpt-oss-120b"}),
    members={"ann": "admin", "bob": "user"},
    metadata={"cost centre": 42, "nested": {"a": [None, True]}},
    budget="standard",
    created_by="master_key",
    is_blocked=True,
)


def audit(number: int = 0) -> AuditRecord:
    return AuditRecord(f"audit_{number}", NOW + number, "master_key", "created", "team", FULL.id, None, {"a": number})


def user(id: str = "", **fields: object) -> DirectoryEntry:
    return replace(DirectoryEntry(EntryKind.USER, id or fresh("user"), NOW), **fields)  # type: ignore[arg-type]


async def test_stored_entry_is_found_by_kind_and_id(factory: StoreFactory) -> None:
    store = await factory.open()
    stored = await store.put_entry(FULL)
    assert stored == replace(FULL, revision=1)
    wanted = [(EntryKind.TEAM, FULL.id), (EntryKind.USER, FULL.id), (EntryKind.TEAM, "x")]
    assert await store.entries(*wanted) == (stored, None, None)
    assert await store.entries() == ()


async def test_entries_of_a_kind_are_listed_oldest_first(factory: StoreFactory) -> None:
    store = await factory.open()
    await store.put_entry(FULL)
    created = [await store.put_entry(user(created_at=NOW - number)) for number in range(3)]
    assert await store.directory(EntryKind.USER) == tuple(reversed(created))
    assert await store.directory(EntryKind.BUDGET) == ()


async def test_change_needs_the_current_revision(factory: StoreFactory) -> None:
    store = await factory.open()
    first = await store.put_entry(user("ann"))
    second = await store.put_entry(replace(first, alias="Ann"), audit(1))
    for change, error in (
        (replace(first, alias="other"), StoreConflict),
        (user("ann", alias="other"), StoreConflict),
        (replace(user("bob"), revision=1), NotFound),
    ):
        with pytest.raises(error):
            await store.put_entry(change, audit(2))
        if change.revision:
            with pytest.raises(error):
                await store.delete_entry(change, audit(2))
    assert await store.entries((EntryKind.USER, "ann"), (EntryKind.USER, "bob")) == (second, None)
    # A refused change leaves no audit record.
    assert await store.audit_records(0, 10) == (1, (audit(1),))


async def test_deleted_entry_is_gone_and_may_be_created_again(factory: StoreFactory) -> None:
    store = await factory.open()
    other = await factory.open() if factory.shared else store
    stored = await store.put_entry(user("ann"))
    await other.delete_entry(stored)
    assert await store.entries((EntryKind.USER, "ann")) == (None,)
    assert await store.directory(EntryKind.USER) == ()
    assert (await store.put_entry(user("ann"))).revision == 1


async def test_only_one_of_concurrent_changes_succeeds(factory: StoreFactory) -> None:
    store = await factory.open()
    created = await store.put_entry(user("ann"))
    changes = [store.put_entry(replace(created, alias=f"{n}"), audit(n)) for n in range(10)]
    results = await asyncio.gather(*changes, return_exceptions=True)
    (stored,) = [result for result in results if isinstance(result, DirectoryEntry)]
    assert await store.entries((EntryKind.USER, "ann")) == (stored,)
    assert (await store.audit_records(0, 10))[0] == 1


async def test_audit_records_are_listed_newest_first(factory: StoreFactory) -> None:
    store = await factory.open()
    assert await store.audit_records(0, 10) == (0, ())
    entry = await store.put_entry(FULL, audit(0))
    key = await store.put_key(KeyRecord("key_a", "ann", (KeyDigest(fresh("digest")),), NOW), audit(1))
    # A repeated write adds no further record.
    await store.put_key(replace(key, revision=0), audit(1))
    await store.put_entry(FULL, audit(0))
    await store.delete_entry(entry, audit(2))
    assert await store.audit_records(0, 10) == (3, (audit(2), audit(1), audit(0)))
    assert await store.audit_records(1, 1) == (3, (audit(1),))
    assert await store.audit_records(3, 10) == (3, ())
