"""Deletion of expired rows with each write, and correction of times after a clock setback.

A machine may start with a clock that is hours ahead. When the clock is corrected, leases, reservations and the usage of
the last minute would lie in the future, and would block their owners for these hours. The file therefore contains the
latest time at which it was written. If the clock shows an earlier time, these short-lived times move back by the
difference. Retention times are not changed, so that no stored data is deleted too early.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from unisono.store.sqlite.connection import Transaction

SWEEP_EVERY_S: Final = 60.0
# Smaller setbacks are ignored, in seconds. The latest time is written at most once in this time.
PRECISION_S: Final = 1.0

MOVE_BACK: Final = (
    "UPDATE leases SET until = until - :by",
    "UPDATE runs SET until = until - :by",
    "UPDATE account_claims SET second = second - :by, expires = expires - :by",
    # The second is a part of the primary key. Negative values are used in between, so that no two rows have equal keys
    # while the statement runs.
    "UPDATE account_seconds SET second = :by - second, expires = expires - :by",
    "UPDATE account_seconds SET second = -second",
)

# Statements that delete the expired rows.
SWEEP: Final = (
    "DELETE FROM events WHERE (tenant, response) IN "
    "(SELECT tenant, id FROM responses WHERE min(expires, log_expires) <= :now)",
    "DELETE FROM tokens WHERE (tenant, response) IN "
    "(SELECT tenant, id FROM responses WHERE min(expires, log_expires) <= :now)",
    "DELETE FROM responses WHERE expires <= :now",
    "DELETE FROM conversation_items WHERE (tenant, conversation) IN "
    "(SELECT tenant, id FROM conversations WHERE expires <= :now)",
    *(
        f"DELETE FROM {table} WHERE expires <= :now"  # noqa: S608 - names of our own
        for table in (
            "conversations",
            "places",
            "leases",
            "keys",
            "counters",
            "counted",
            "traces",
            "request_deleted_keys",
        )
    ),
    *(
        f"DELETE FROM account_{table} WHERE expires <= :now"  # noqa: S608 - names of our own
        for table in ("seconds", "claims", "spent", "settled", "counted")
    ),
)


class FileUpkeep:
    """Upkeep of one store, as the context of every transaction that writes."""

    def __init__(self) -> None:
        self._swept_at = 0.0

    @contextmanager
    def during(self, act: Transaction) -> Iterator[None]:
        before = act.db.total_changes
        latest = _latest(act)
        if act.now <= latest - PRECISION_S:
            for statement in MOVE_BACK:
                act.db.execute(statement, {"by": math.ceil(latest - act.now)})
        if abs(act.now - self._swept_at) >= SWEEP_EVERY_S:
            sweep(act)
            self._swept_at = act.now
        yield
        # A transaction without changes must not cause a write to the disk.
        if act.db.total_changes > before and abs(act.now - latest) >= PRECISION_S:
            act.db.execute("REPLACE INTO clock VALUES (1, ?)", (act.now,))


def _latest(act: Transaction) -> float:
    """Return the latest time at which the file was written, or 0 if it is unknown."""
    row = act.db.execute("SELECT latest FROM clock").fetchone()
    return 0.0 if row is None else float(row[0])


def sweep(act: Transaction) -> None:
    for statement in SWEEP:
        act.db.execute(statement, {"now": act.now})
