"""Keys that were imported from LiteLLM, which stores the SHA-256 digest of a key.

Unlike a virtual key of this gateway, an imported key has no seal. So only a lookup in the store shows whether it is
valid. A gateway looks such keys up only if keys were imported, which it notices within half a second.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from unisono.core.directory import DirectoryStore, EntryKind
from unisono.errors import StoreUnavailable

# Entry of the directory that exists if keys were imported.
IMPORTED: Final = (EntryKind.SETTING, "litellm_keys")
# Prefix of all keys that LiteLLM accepts.
PREFIX: Final = "sk-"
MAX_LENGTH: Final = 256
CHECK_INTERVAL_S: Final = 0.5


def to_digest(token: str) -> str:
    """Return the digest in the store for a token of LiteLLM.

    The token is the hexadecimal SHA-256 digest of a key.
    """
    return f"sha256:{token}"


def digest_of(presented: str) -> str:
    return to_digest(hashlib.sha256(presented.encode("utf-8", "surrogatepass")).hexdigest())


class ImportedKeys:
    """Check whether a key may be an imported key.

    `monotonic` returns seconds of a clock that never goes back.
    """

    def __init__(self, store: DirectoryStore, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        self._check_at = 0.0
        self._has_keys = False

    async def digest(self, presented: str) -> str | None:
        """Return the digest of a key, or None if it cannot be an imported key."""
        if not presented.startswith(PREFIX) or len(presented) > MAX_LENGTH:
            return None
        if (now := self._monotonic()) >= self._check_at:
            self._check_at = now + CHECK_INTERVAL_S
            with suppress(StoreUnavailable):
                (entry,) = await self._store.entries(IMPORTED)
                self._has_keys = entry is not None
        return digest_of(presented) if self._has_keys else None
