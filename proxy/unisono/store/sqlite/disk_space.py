"""Check of the disk space for the SQLite file, before an answer is generated.

A trial write costs two disk syncs, so it runs only after a failed operation or while space is low.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from unisono.core.state_store import StoredResponse
from unisono.store import codec
from unisono.store.codec import MIB
from unisono.store.sqlite import conversations
from unisono.store.sqlite.connection import Transaction

# Free space below which every check performs a trial write.
LOW_BYTES = 64 * MIB
# Size of the trial write: more than an ordinary response takes.
TRIAL_BYTES = MIB // 4
# Name of the trial row in the `secrets` table. If the row remains, the next trial overwrites it.
TRIAL = "trial"


def is_disk_low(
    act: Transaction, path: Path | None, low_bytes: int, beginning: StoredResponse | None, tenant: str
) -> bool:
    """Return True if the disk of `path` has less than `low_bytes` left.

    Return False if the free space cannot be determined. Raises `StoreTooLarge` if `beginning`, the response that
    `tenant` is about to store, is too large for the store or its conversation, regardless of the disk.
    """
    if beginning is not None:
        _, input, _ = codec.encode_response(beginning, act.bounds)
        if beginning.conversation is not None:
            conversations.check_room(act, tenant, beginning.conversation, len(input))
    if path is None:
        return False
    try:
        return shutil.disk_usage(path.expanduser().parent).free < low_bytes
    except (OSError, RuntimeError):
        return False


def fill(act: Transaction) -> None:
    act.db.execute("REPLACE INTO secrets VALUES (?, zeroblob(?))", (TRIAL, TRIAL_BYTES))


def clear(act: Transaction) -> None:
    act.db.execute("DELETE FROM secrets WHERE name = ?", (TRIAL,))
