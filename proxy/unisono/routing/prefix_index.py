"""Which deployments hold the beginning of a prompt in their cache, as far as it was the gateway who put it there.

Block numbers stand for everything up to their end (`core.blocks`), so a deployment that holds a block holds those
before it, and the longest common beginning is found by halving. Bounded, and only ever a guess: what a backend dropped
by itself costs a prompt read again, and nothing more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

BLOCKS: Final = 200_000
"""Blocks remembered: 25 million tokens, in some 40 MB."""
KEPT_S: Final = 1800.0
"""Seconds after which nobody believes that a prompt is still cached."""


class PrefixIndex:
    """Masks of deployments by block number. `now` is monotonic seconds and never goes back."""

    def __init__(self, blocks: int = BLOCKS, kept_s: float = KEPT_S) -> None:
        self._holders: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._most = blocks
        self._kept_s = kept_s
        self._free: list[int] = []
        self._bits = 0
        self._forgotten: dict[int, float] = {}
        """By bit: when what it held was lost. Blocks written before that do not count for it."""

    def __len__(self) -> int:
        return len(self._holders)

    def join(self) -> int:
        """A bit for a deployment, its own until it leaves."""
        if self._free:
            return self._free.pop()
        self._bits += 1
        return 1 << (self._bits - 1)

    def leave(self, bit: int, now: float) -> None:
        self.forget(bit, now)
        self._free.append(bit)

    def forget(self, bit: int, now: float) -> None:
        """The deployment's cache is gone: it died, or is another process now."""
        # What was written longer ago than anything is believed needs no word of its loss.
        self._forgotten = {b: when for b, when in self._forgotten.items() if now - when <= self._kept_s} | {bit: now}

    def held(self, blocks: Sequence[int], now: float) -> list[tuple[int, int]]:
        """Who holds how much of a prompt: masks with the number of blocks, fewer deployments and more blocks in each
        row than in the one before."""
        if not blocks:
            return []
        count = len(blocks)
        first = self._holding(blocks[0], now)
        whole = first and first & self._holding(blocks[-1], now)
        found: list[tuple[int, int]] = []
        # Stretches with who holds their first and their last block, the leftmost on top: only one between whose ends
        # somebody is lost is looked into, so that many ends cost less than as many searches.
        stretches = [(0, first, count - 1, whole)]
        while stretches:
            low, before, high, after = stretches.pop()
            while before != after and high - low > 1:
                middle = (low + high) // 2
                there = before & self._holding(blocks[middle], now) | after
                if there != after:
                    stretches.append((middle, there, high, after))
                high, after = middle, there
            if before != after:
                found.append((before, high))
        if whole:
            found.append((whole, count))
        return found

    def record(self, blocks: Sequence[int], bit: int, now: float) -> None:
        """The deployment holds a prompt of these blocks."""
        holders = self._holders
        # From the end, so that what is dropped first is the end of a prompt and never its beginning alone.
        for block in reversed(blocks):
            holders[block] = (self._holding(block, now) | bit, now)
            holders.move_to_end(block)
        while len(holders) > self._most:
            holders.popitem(last=False)

    def _holding(self, block: int, now: float) -> int:
        entry = self._holders.get(block)
        if entry is None:
            return 0
        mask, written = entry
        if now - written > self._kept_s:
            return 0
        if self._forgotten:
            for bit, when in self._forgotten.items():
                if when >= written:
                    mask &= ~bit
        return mask
