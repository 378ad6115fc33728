"""A prompt in blocks, each known by a number that stands for all tokens up to its end.

Two prompts have as many numbers in common as they have whole blocks of the same tokens from the beginning, which is
what a backend's prefix cache can use of the one for the other. No randomness: every process makes the same numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

BLOCK_TOKENS: Final = 128
"""Coarser than any engine's own: what is lost to a cut at the last one is a fraction of a prompt worth moving."""


def blocks_of(tokens: Sequence[int], salt: str = "") -> tuple[int, ...]:
    """The numbers of all whole blocks of a prompt, 64 bits each. What has another `salt` has no number in common."""
    digest = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8)
    data = memoryview(array("I", tokens).tobytes())
    size = BLOCK_TOKENS * array("I").itemsize
    numbers = []
    for end in range(size, len(data) + 1, size):
        digest.update(data[end - size : end])
        numbers.append(int.from_bytes(digest.copy().digest(), "big"))
    return tuple(numbers)
