"""Whether the file takes more: found out before an answer is made that could not be kept.

A trial write costs two syncs of the disk, so it is made only where there is reason to doubt: after an act that failed,
and while little space is left.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from unisono.core.state_store import MIB, StoredResponse
from unisono.store import codec
from unisono.store.sqlite.schema import Transaction

LOW_BYTES = 64 * MIB
"""Free space from which on every write is doubted."""
TRIAL_BYTES = MIB // 4
"""More than an ordinary response takes."""
TRIAL = "trial"
"""The name the trial is written under, beside the secrets. One that is left behind is overwritten by the next."""


def examine(act: Transaction, path: Path | None, low_bytes: int, beginning: StoredResponse | None) -> bool:
    """Whether the disk under `path` has less than `low_bytes` left; False where that cannot be told. Raises
    `StoreTooLarge`."""
    if beginning is not None:
        codec.encode_response(beginning, act.bounds)
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
