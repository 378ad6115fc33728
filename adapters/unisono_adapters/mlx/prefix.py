"""Attention caches of earlier prompts, so that a continued conversation computes only what is new.

Only a whole earlier sequence that the new prompt begins with is reused: gpt-oss has sliding-window layers, whose
caches cannot be cut back to an earlier point. Tenants are kept apart by their salt. Bounded in entries and bytes, the
least recently used goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


class LayerCache(Protocol):
    """One layer's keys and values, as mlx_lm keeps them."""

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
    """Layers by the ids they stand for. What is handed out must not be changed: it stays in here."""

    def __init__(self, entries: int, size: int) -> None:
        """`size` is in bytes; 0 turns the cache off."""
        self._most = entries
        self._limit = size
        self._size = 0
        self._kept: OrderedDict[tuple[str, tuple[int, ...]], _Entry] = OrderedDict()

    def longest(self, salt: str, prompt: Sequence[int]) -> tuple[int, Layers | None]:
        """How many of `prompt`'s first ids are known, and their layers: never the last id, which has to be computed
        for generation to begin."""
        whole = tuple(prompt)
        best: tuple[str, tuple[int, ...]] | None = None
        for key in self._kept:
            owner, ids = key
            length = len(ids)
            if owner != salt or length >= len(whole) or (best is not None and length <= len(best[1])):
                continue
            # Prompts of one application begin alike for thousands of ids; the last one tells most of them apart.
            if whole[length - 1] == ids[-1] and whole[:length] == ids:
                best = key
        if best is None:
            return 0, None
        self._kept.move_to_end(best)
        return len(best[1]), self._kept[best].layers

    def keep(self, salt: str, ids: Sequence[int], layers: Layers) -> None:
        size = sum(layer.nbytes for layer in layers)
        if not ids or size > self._limit:
            return
        self._drop((salt, tuple(ids)))
        self._kept[salt, tuple(ids)] = _Entry(layers, size)
        self._size += size
        while self._size > self._limit or len(self._kept) > self._most:
            self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        self._kept.clear()
        self._size = 0

    def _drop(self, key: tuple[str, tuple[int, ...]]) -> None:
        entry = self._kept.pop(key, None)
        if entry is not None:
            self._size -= entry.size
