"""SQL for idempotency keys, in the caller's transaction."""

from __future__ import annotations

from unisono.store.sqlite.connection import Transaction
from unisono.store.write_errors import refusal


def claim(act: Transaction, tenant: str, key: str, digest: str, response: str, for_s: float | None) -> str:
    row = act.db.execute(
        "SELECT digest, response FROM keys WHERE tenant = ? AND key = ? AND expires > ?", (tenant, key, act.now)
    ).fetchone()
    if row is None:
        expires = act.now + (act.retention.key_s if for_s is None else for_s)
        act.db.execute("REPLACE INTO keys VALUES (?, ?, ?, ?, ?)", (tenant, key, digest, response, expires))
        return response
    if row[0] != digest:
        raise refusal("reused")
    if for_s is not None:
        act.db.execute(
            "UPDATE keys SET expires = max(expires, ?) WHERE tenant = ? AND key = ? AND response = ?",
            (act.now + for_s, tenant, key, response),
        )
    return str(row[1])


def unclaim(act: Transaction, tenant: str, key: str, response: str) -> None:
    act.db.execute("DELETE FROM keys WHERE tenant = ? AND key = ? AND response = ?", (tenant, key, response))
