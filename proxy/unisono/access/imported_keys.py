"""Keys that were imported from LiteLLM, which stores the SHA-256 of a key.

Such a key has no seal, so that only the store can recognise it. Gateways look such keys up only after an import, which
they notice within half a second.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from unisono.core.directory import DirectoryStore, EntryKind
from unisono.errors import StoreUnavailable

# Entry of the directory that tells that keys were imported.
IMPORTED: Final = (EntryKind.SETTING, "litellm_keys")
# LiteLLM accepts no other keys.
PREFIX: Final = "sk-"
MAX_LENGTH: Final = 256
CHECK_INTERVAL_S: Final = 0.5


def to_digest(token: str) -> str:
    """Return the digest in the store for LiteLLM's token, the hexadecimal SHA-256 of a key."""
    return f"sha256:{token}"


def digest_of(presented: str) -> str:
    return to_digest(hashlib.sha256(presented.encode("utf-8", "surrogatepass")).hexdigest())


class ImportedKeys:
    """Recognises keys that may have been imported.

    `monotonic` returns seconds that never decrease.
    """

    def __init__(self, store: DirectoryStore, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        self._check_at = 0.0
        self._has_keys = False

    async def digest(self, presented: str) -> str | None:
        """Return the digest of a key; None if it cannot be an imported one."""
        if not presented.startswith(PREFIX) or len(presented) > MAX_LENGTH:
            return None
        if (now := self._monotonic()) >= self._check_at:
            self._check_at = now + CHECK_INTERVAL_S
            with suppress(StoreUnavailable):
                (entry,) = await self._store.entries(IMPORTED)
                self._has_keys = entry is not None
        return digest_of(presented) if self._has_keys else None
