"""Tests of the limits that a caller gets from its key, its team, its user and a named budget."""

from __future__ import annotations

import pytest

from unisono.core.access import KeyRecord, caller_with_shares, with_budget
from unisono.core.budget_period import NO_PERIOD, Period
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


DAILY = Period("day")
HOURLY = Period("every", 3600)
NAMED = DirectoryEntry(
    EntryKind.BUDGET, "daily", NOW, limits=KeyLimits(money_budget=20, budget_period=DAILY, budget_since=7.0)
)


@pytest.mark.parametrize(
    ("own", "period", "since"),
    [
        (KeyLimits(), DAILY, 7.0),
        (KeyLimits(rpm=5), DAILY, 7.0),
        # The named budget must renew, also if the key has a budget of another kind.
        (KeyLimits(token_budget=100), DAILY, 7.0),
        (KeyLimits(token_budget=100, soft_budget=5), DAILY, 7.0),
        (KeyLimits(token_budget=100, budget_period=HOURLY, budget_since=3.0), HOURLY, 3.0),
        # Nothing is taken from the named budget, so the own budget never renews.
        (KeyLimits(money_budget=30), NO_PERIOD, 0.0),
        (KeyLimits(money_budget=30, token_budget=100), NO_PERIOD, 0.0),
    ],
)
def test_budget_that_is_taken_renews(own: KeyLimits, period: Period, since: float) -> None:
    limits = with_budget(own, "daily", NAMED)
    assert (limits.budget_period, limits.budget_since) == (period, since)
    assert (limits.money_budget, limits.token_budget) == (own.money_budget or 20, own.token_budget)
