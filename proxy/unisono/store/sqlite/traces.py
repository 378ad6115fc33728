"""Recordings of answers in SQLite: storing, reading and pruning."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.recordings import StoredTrace
from unisono.store.sqlite.connection import Transaction, Transactions


class SqliteTraces:
    """Part of the SQLite store that implements `TraceStore`."""

    async def keep_traces(self: Transactions, *traces: StoredTrace, for_s: float, most: int) -> None:
        await self._run(_write, traces, for_s, most)

    async def trace(self: Transactions, tenant: str, id: str) -> StoredTrace | None:
        return await self._read(_get, tenant, id)

    async def traces(self: Transactions, tenant: str, limit: int = 20) -> tuple[StoredTrace, ...]:
        return await self._read(_latest, tenant, limit)


def _write(act: Transaction, traces: Sequence[StoredTrace], for_s: float, most: int) -> None:
    for one in traces:
        act.db.execute("DELETE FROM traces WHERE tenant = ? AND id = ?", (one.tenant, one.id))
        act.db.execute(
            "INSERT INTO traces (tenant, id, at, about, document, expires) VALUES (?, ?, ?, ?, ?, ?)",
            (one.tenant, one.id, one.at, one.about, one.document, act.now + for_s),
        )
    for tenant in {one.tenant for one in traces}:
        act.db.execute(
            "DELETE FROM traces WHERE tenant = ? AND number <= "
            "(SELECT number FROM traces WHERE tenant = ? ORDER BY number DESC LIMIT 1 OFFSET ?)",
            (tenant, tenant, most),
        )


def _get(act: Transaction, tenant: str, id: str) -> StoredTrace | None:
    row = act.db.execute(
        "SELECT at, about, document FROM traces WHERE tenant = ? AND id = ? AND expires > ?", (tenant, id, act.now)
    ).fetchone()
    return None if row is None else StoredTrace(tenant, id, row[0], bytes(row[1]), bytes(row[2]))


def _latest(act: Transaction, tenant: str, limit: int) -> tuple[StoredTrace, ...]:
    rows = act.db.execute(
        "SELECT id, at, about FROM traces WHERE tenant = ? AND expires > ? ORDER BY number DESC LIMIT ?",
        (tenant, act.now, limit),
    )
    return tuple(StoredTrace(tenant, id, at, bytes(about)) for id, at, about in rows)
