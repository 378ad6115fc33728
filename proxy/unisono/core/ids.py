"""Ids that are derived from a seed, so that a replay of the same events gives the same ids."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

BYTES: Final = 16


class DerivedIds:
    """Series of ids that cannot be guessed without `seed`; each `purpose` has its own series."""

    def __init__(self, seed: str, purpose: str) -> None:
        self._seed = f"{purpose}\0{seed}".encode()
        self._made = 0

    def __call__(self, prefix: str) -> str:
        """Return the next id: `prefix` and 32 hexadecimal digits."""
        self._made += 1
        digest = blake2b(self._seed + self._made.to_bytes(8, "big"), digest_size=BYTES, person=b"unisono-ids")
        return prefix + digest.hexdigest()
