"""SQL for leases, watched background jobs, secrets and counters.

All statements run in the caller's transaction.
"""

from __future__ import annotations

from unisono.core.state_store import BackgroundRun, Lease
from unisono.store.sqlite.connection import Transaction
from unisono.store.write_errors import refusal


def check_lease(act: Transaction, tenant: str, anchor: str, lease: Lease | None) -> None:
    """Check that a writer may write.

    Raises `StoreConflict` if `lease` is no longer the current one, or if it is None and another writer has a lease.
    """
    row = act.db.execute(
        "SELECT fence, until FROM leases WHERE tenant = ? AND anchor = ? AND expires > ?", (tenant, anchor, act.now)
    ).fetchone()
    if lease is None:
        if row is not None and row[1] > act.now:
            raise refusal("busy")
    elif row is None or (lease.tenant, lease.anchor, lease.fence) != (tenant, anchor, row[0]):
        raise refusal("taken")


def acquire(
    act: Transaction, tenant: str, anchor: str, owner: str, for_s: float, force: bool, reserve_s: float
) -> Lease | None:
    row = act.db.execute(
        "SELECT owner, fence, until FROM leases WHERE tenant = ? AND anchor = ? AND expires > ?",
        (tenant, anchor, act.now),
    ).fetchone()
    holder, fence, until = row or ("", 0, 0.0)
    live = until > act.now
    if live and holder != owner:
        is_same_response = holder.rpartition(":")[2] == owner.rpartition(":")[2]
        if not (is_same_response and (force or until <= act.now + reserve_s)):
            return None
    if not (live and holder == owner):
        fence += 1
    until = act.now + for_s + reserve_s
    act.db.execute(
        "REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?)",
        (tenant, anchor, owner, fence, until, until + act.retention.response_s),
    )
    _keep_conversation(act, tenant, anchor)
    return Lease(tenant, anchor, owner, fence, reserve_s)


def _keep_conversation(act: Transaction, tenant: str, anchor: str) -> None:
    """Renew the conversation of a lease, so that it exists until its response ends."""
    act.db.execute(
        "UPDATE conversations SET expires = ? WHERE tenant = ? AND id = ? AND expires > ?",
        (act.now + act.retention.conversation_s, tenant, anchor, act.now),
    )


def extend(act: Transaction, lease: Lease, for_s: float) -> bool:
    """Set the end of a lease to `for_s` seconds from now; 0 releases it. The fence remains.

    Returns False if a later lease exists, which has a higher fence.
    """
    changed = act.db.execute(
        "UPDATE leases SET owner = ?, until = ?, expires = ? WHERE tenant = ? AND anchor = ? AND fence = ?",
        (
            lease.owner,
            act.now + for_s,
            act.now + for_s + act.retention.response_s,
            lease.tenant,
            lease.anchor,
            lease.fence,
        ),
    )
    if changed.rowcount == 1:
        _keep_conversation(act, lease.tenant, lease.anchor)
    return changed.rowcount == 1


def watch(act: Transaction, run: BackgroundRun, for_s: float) -> None:
    act.db.execute("REPLACE INTO runs VALUES (?, ?, ?)", (run.tenant, run.response, act.now + for_s))


def unwatch(act: Transaction, run: BackgroundRun) -> None:
    act.db.execute("DELETE FROM runs WHERE tenant = ? AND response = ?", (run.tenant, run.response))


def lapsed(act: Transaction, limit: int) -> tuple[BackgroundRun, ...]:
    rows = act.db.execute("SELECT tenant, response FROM runs WHERE until <= ? ORDER BY until LIMIT ?", (act.now, limit))
    return tuple(BackgroundRun(*row) for row in rows)


def secret(act: Transaction, name: str, candidate: bytes) -> bytes:
    act.db.execute("INSERT OR IGNORE INTO secrets VALUES (?, ?)", (name, candidate))
    return bytes(act.db.execute("SELECT value FROM secrets WHERE name = ?", (name,)).fetchone()[0])


def known_secret(act: Transaction, name: str) -> bytes | None:
    row = act.db.execute("SELECT value FROM secrets WHERE name = ?", (name,)).fetchone()
    return None if row is None else bytes(row[0])


def count(act: Transaction, tenant: str, name: str, amount: int, once: str, for_s: float) -> int:
    expires = act.now + for_s
    row = act.db.execute(
        "SELECT value FROM counters WHERE tenant = ? AND name = ? AND expires > ?", (tenant, name, act.now)
    ).fetchone()
    value = row[0] if row else 0
    known = act.db.execute(
        "SELECT 1 FROM counted WHERE tenant = ? AND name = ? AND once = ? AND expires > ?",
        (tenant, name, once, act.now),
    ).fetchone()
    if known:
        return int(value)
    act.db.execute("REPLACE INTO counted VALUES (?, ?, ?, ?)", (tenant, name, once, expires))
    act.db.execute("REPLACE INTO counters VALUES (?, ?, ?, ?)", (tenant, name, value + amount, expires))
    return int(value + amount)
