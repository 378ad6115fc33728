"""Cache of the attention states of earlier prompts.

With it, only the new tokens of a prompt must be computed. An earlier sequence is reused only if the whole sequence is a
prefix of the new prompt, because gpt-oss has sliding-window layers, whose caches cannot be truncated. Only requests
with the same salt share entries, which separates tenants. The cache has a maximum number of entries and of bytes, and
evicts the least recently used entry.
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
    """Attention caches of earlier prompts, by salt and token ids.

    An entry has one cache for each layer of the model. Callers must not change the returned layers.
    """

    def __init__(self, entries: int, size: int) -> None:
        """Create a cache of at most `entries` entries and `size` bytes.

        A `size` of 0 turns the cache off.
        """
        self._max_entries = entries
        self._limit = size
        self._size = 0
        self._entries: OrderedDict[tuple[str, tuple[int, ...]], _Entry] = OrderedDict()

    def longest_prefix(self, salt: str, prompt: Sequence[int]) -> tuple[int, Layers | None]:
        """Return the longest cached prefix of `prompt`: its length in tokens, and its layers.

        Returns 0 and None if no prefix is cached. A prefix never includes the last token of the prompt, because
        generation begins by computing that token.
        """
        whole = tuple(prompt)
        best: tuple[str, tuple[int, ...]] | None = None
        for key in self._entries:
            owner, ids = key
            length = len(ids)
            if owner != salt or length >= len(whole) or (best is not None and length <= len(best[1])):
                continue
            # Prompts of one application begin with thousands of equal ids, so compare the last id of the prefix first.
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
