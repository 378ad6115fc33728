"""Prompt prefixes as blocks; a block's hash covers all tokens up to its end.

Two prompts share as many hashes as they share whole blocks from the beginning. That is the part of one that a
backend's prefix cache can reuse for the other. No randomness: every process computes the same hashes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

# Block size in tokens, coarser than any engine's own. The loss from cutting at a block end is a small part of any
# prompt worth routing by prefix.
BLOCK_TOKENS: Final = 128


def blocks_of(tokens: Sequence[int], salt: str = "") -> tuple[int, ...]:
    """Return 64-bit hashes of all whole blocks; prompts with different `salt` share none."""
    digest = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8)
    data = memoryview(array("I", tokens).tobytes())
    size = BLOCK_TOKENS * array("I").itemsize
    numbers = []
    for end in range(size, len(data) + 1, size):
        digest.update(data[end - size : end])
        numbers.append(int.from_bytes(digest.copy().digest(), "big"))
    return tuple(numbers)
