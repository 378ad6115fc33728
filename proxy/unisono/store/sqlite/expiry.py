"""Deletion of expired rows, to reclaim their space. Readers ignore expired rows anyway."""

from __future__ import annotations

from typing import Final

from unisono.store.sqlite.connection import Transaction

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


def sweep(act: Transaction) -> None:
    for statement in SWEEP:
        act.db.execute(statement, {"now": act.now})
