"""Test of settlements in a SQLite file of an earlier version."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from unisono.core.quotas import Account, LedgerLine, TokenUsage, UsageRecord
from unisono.core.state_store import Retention
from unisono.store.sqlite import SqliteStore

DAY = "2026-11-21"


async def test_settlement_marker_of_an_earlier_version_counts_in_full(tmp_path: Path) -> None:
    path, owner = tmp_path / "state.db", Account("t", "key")
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
        entry = LedgerLine(owner, "m", DAY, TokenUsage(requests=1, output=7))
        await store.settle(UsageRecord("resp_1", entry), UsageRecord("resp_2", entry))
        assert [line.used for line in await store.ledger(DAY, DAY, owner)] == [entry.used]
    finally:
        await store.aclose()
