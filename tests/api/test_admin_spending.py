"""Spend of keys in the current budget period."""

from __future__ import annotations

import pytest

from unisono.api.admin.administration import Administration
from unisono.api.admin.budget_spend import key_spend
from unisono.core.access import KeyRecord
from unisono.core.budget_period import Period
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.core.quotas import Account, KeyLimits, LedgerLine, TokenUsage, UsageRecord
from unisono.store.sqlite import SqliteStore

# 2026-11-29, 10:00 UTC.
NOW = 1_795_946_400.0
DAYS = ("2026-11-28", "2026-11-29")
DAILY = KeyLimits(money_budget=40_000, budget_period=Period("day"))


async def no_salt() -> bytes:
    return b""


@pytest.mark.parametrize(
    ("record", "spend", "budget"),
    [
        (KeyRecord("key", "key", (), NOW), 0.03, None),
        (KeyRecord("key", "key", (), NOW, limits=DAILY), 0.02, None),
        (KeyRecord("key", "key", (), NOW, budget="daily"), 0.02, ("daily", 0.04, "day", "2026-11-30T00:00:00Z")),
    ],
    ids=["no budget", "own budget", "named budget"],
)
async def test_spend_is_that_of_the_period_of_the_budget(
    record: KeyRecord, spend: float, budget: tuple[str, float, str, str] | None
) -> None:
    store = SqliteStore(None)
    await store.start()
    try:
        await store.put_entry(DirectoryEntry(EntryKind.BUDGET, "daily", NOW, limits=DAILY))
        for day, cost in zip(DAYS, (10_000, 20_000), strict=True):
            line = LedgerLine(Account("key", "key"), "gpt-oss", day, TokenUsage(requests=1, cost=cost))
            await store.settle(UsageRecord(day, line))
        answer = await key_spend(Administration(store, no_salt, lambda: NOW), record)
    finally:
        await store.aclose()
    assert answer["spend"] == pytest.approx(spend)
    table = answer["litellm_budget_table"]
    assert (table is None) == (budget is None)
    if isinstance(table, dict):
        names = ("budget_id", "max_budget", "budget_duration", "budget_reset_at")
        assert tuple(table[name] for name in names) == budget
