"""Settlements in a SQLite file that an earlier version wrote."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from unisono.core.quotas import Account, LedgerLine, TokenUsage, UsageRecord
from unisono.core.state_store import Retention
from unisono.store.sqlite import SqliteStore

DAY = "2026-11-21"


async def test_a_mark_of_an_earlier_version_counts_as_settled_in_full(tmp_path: Path) -> None:
    path, whose = tmp_path / "state.db", Account("t", "key")
    store = SqliteStore(path, Retention())
    await store.start()
    await store.aclose()
    db = sqlite3.connect(path)
    with db:
        db.execute("DROP TABLE account_counted")
        db.execute("INSERT INTO account_settled VALUES ('t', 'key', 'resp_1', 1e15)")
    db.close()
    store = SqliteStore(path, Retention())
    await store.start()
    try:
        entry = LedgerLine(whose, "m", DAY, TokenUsage(requests=1, output=7))
        await store.settle(UsageRecord("resp_1", entry), UsageRecord("resp_2", entry))
        assert [one.used for one in await store.ledger(DAY, DAY, whose)] == [entry.used]
    finally:
        await store.aclose()
