"""Index of the prompt prefixes that deployments have cached.

A deployment has cached a prompt if the gateway sent it the prompt. The number of a block identifies the whole prompt
up to the block's end (`core.route_protocol.blocks_of`). A deployment that has cached a block has also cached the blocks
before it, so the longest common prefix is found by bisection. The size of the index is limited. The index is only an
estimate: if a deployment has evicted a prefix, it reads the prompt again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

# Maximum number of indexed blocks. They cover 25 million tokens, and take about 40 MB.
BLOCKS: Final = 200_000
# Seconds after which a prompt is no longer assumed to be cached.
RETENTION_S: Final = 1800.0


class PrefixIndex:
    """Mask of the deployments that have probably cached each prompt block, by block number.

    `now` is monotonic seconds and never decreases.
    """

    def __init__(self, blocks: int = BLOCKS, kept_s: float = RETENTION_S) -> None:
        self._holders: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._max_blocks = blocks
        self._retention_s = kept_s
        self._free: list[int] = []
        self._bits = 0
        # Time at which a deployment lost its cache, by bit. Older entries of the index do not apply to the deployment.
        self._forgotten: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def join(self) -> int:
        """Return a mask bit for a deployment. No other deployment gets this bit before `leave`."""
        if self._free:
            return self._free.pop()
        self._bits += 1
        return 1 << (self._bits - 1)

    def leave(self, bit: int, now: float) -> None:
        self.forget(bit, now)
        self._free.append(bit)

    def forget(self, bit: int, now: float) -> None:
        """Mark a deployment's cache as lost, because the process died or was replaced."""
        # Losses older than the lifetime of an entry need no record.
        self._forgotten = {b: when for b, when in self._forgotten.items() if now - when <= self._retention_s} | {
            bit: now
        }

    def cached_prefixes(self, blocks: Sequence[int], now: float) -> list[tuple[int, int]]:
        """Return masks of deployments with the number of prompt blocks that they have cached.

        Each row has fewer deployments and more blocks than the row before.
        """
        if not blocks:
            return []
        count = len(blocks)
        first = self._holding(blocks[0], now)
        whole = first and first & self._holding(blocks[-1], now)
        found: list[tuple[int, int]] = []
        # Stack of ranges of blocks, each with the masks of its first and last block; the leftmost range is on top. Only
        # ranges whose two masks differ are searched, which is faster than a separate search for each deployment.
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
        """Record that the deployment `bit` has cached a prompt of these blocks."""
        holders = self._holders
        # In reverse order, so that the index drops the end of a prompt before its beginning.
        for block in reversed(blocks):
            holders[block] = (self._holding(block, now) | bit, now)
            holders.move_to_end(block)
        while len(holders) > self._max_blocks:
            holders.popitem(last=False)

    def _holding(self, block: int, now: float) -> int:
        entry = self._holders.get(block)
        if entry is None:
            return 0
        mask, written = entry
        if now - written > self._retention_s:
            return 0
        if self._forgotten:
            for bit, when in self._forgotten.items():
                if when >= written:
                    mask &= ~bit
        return mask
