"""Attention caches of earlier prompts, so that only new tokens are computed.

Only a whole earlier sequence that is a prefix of the new prompt is reused: gpt-oss has sliding-window layers,
whose caches cannot be truncated. Tenants are separated by their salt. The cache is bounded in entries and bytes
and evicts the least recently used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from unisono.core.frozen import dataclass


class LayerCache(Protocol):
    """Keys and values of one layer, as stored by mlx_lm."""

    @property
    def nbytes(self) -> int: ...

    @property
    def state(self) -> object: ...


Layers: TypeAlias = Sequence[LayerCache]


@dataclass(frozen=True, slots=True)
class _Entry:
    layers: Layers
    size: int


class Prefixes:
    """Layers by the ids that they represent. Returned layers must not be changed."""

    def __init__(self, entries: int, size: int) -> None:
        """Create a cache of at most `size` bytes; 0 turns it off."""
        self._max_entries = entries
        self._limit = size
        self._size = 0
        self._entries: OrderedDict[tuple[str, tuple[int, ...]], _Entry] = OrderedDict()

    def longest_prefix(self, salt: str, prompt: Sequence[int]) -> tuple[int, Layers | None]:
        """Return the length of the longest cached prefix of `prompt`, and its layers.

        The last id is never included, since generation has to compute it.
        """
        whole = tuple(prompt)
        best: tuple[str, tuple[int, ...]] | None = None
        for key in self._entries:
            owner, ids = key
            length = len(ids)
            if owner != salt or length >= len(whole) or (best is not None and length <= len(best[1])):
                continue
            # Prompts of one application share thousands of first ids, so compare the last one first.
            if whole[length - 1] == ids[-1] and whole[:length] == ids:
                best = key
        if best is None:
            return 0, None
        self._entries.move_to_end(best)
        return len(best[1]), self._entries[best].layers

    def keep(self, salt: str, ids: Sequence[int], layers: Layers) -> None:
        size = sum(layer.nbytes for layer in layers)
        if not ids or size > self._limit:
            return
        self._drop((salt, tuple(ids)))
        self._entries[salt, tuple(ids)] = _Entry(layers, size)
        self._size += size
        while self._size > self._limit or len(self._entries) > self._max_entries:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        self._entries.clear()
        self._size = 0

    def _drop(self, key: tuple[str, tuple[int, ...]]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._size -= entry.size
