"""Tests of the limits that a caller gets from its key, its team, its user and a named budget."""

from __future__ import annotations

import pytest

from unisono.core.access import KeyRecord, caller_with_shares
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.core.quotas import KeyLimits
from unisono.store.sqlite import SqliteStore

NOW = 1_790_000_000.5
BUDGET = DirectoryEntry(EntryKind.BUDGET, "small", NOW, limits=KeyLimits(rpm=3, token_budget=900))


@pytest.mark.parametrize("has_budget", [True, False], ids=["existing budget", "deleted budget"])
async def test_key_whose_budget_was_deleted_may_use_no_tokens(has_budget: bool) -> None:
    store = SqliteStore(None)
    await store.start()
    try:
        if has_budget:
            await store.put_entry(BUDGET)
        await store.put_entry(DirectoryEntry(EntryKind.USER, "ann", NOW, budget="small"))
        key = KeyRecord("key", "key", (), NOW, limits=KeyLimits(rpm=5), user="ann", budget="small")
        caller = await caller_with_shares(store, key)
    finally:
        await store.aclose()
    assert caller is not None
    limits = [caller.limits, *(shared.limits for shared in caller.shared_limits)]
    assert [each.token_budget for each in limits] == ([900, 900] if has_budget else [0, 0])
    assert [each.rpm for each in limits] == ([5, 3] if has_budget else [5, None])
