"""Bounded caches that evict the least recently used entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Cache that threads may share; `capacity` bounds the sum of the weights of its values."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._weight = 0
        self._lock = Lock()

    @property
    def weight(self) -> int:
        """Sum of the stored weights; never above the capacity."""
        return self._weight

    def get(self, key: K) -> V | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def get_all(self, keys: Iterable[K]) -> list[V | None]:
        """Return one value per key, None for a missing one."""
        found: list[V | None] = []
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is None:
                    found.append(None)
                else:
                    self._entries.move_to_end(key)
                    found.append(entry[0])
        return found

    def put(self, key: K, value: V, weight: int) -> None:
        """Store a value, unless it is heavier than the whole capacity."""
        if weight > self._capacity:
            return
        with self._lock:
            before = self._entries.pop(key, None)
            self._weight += weight - (before[1] if before else 0)
            self._entries[key] = (value, weight)
            while self._weight > self._capacity:
                _, (_, dropped) = self._entries.popitem(last=False)
                self._weight -= dropped


class RecentEntries(OrderedDict[K, V]):
    """Dictionary of at most `capacity` entries, in the order of their last use.

    If there are too many entries, `put` drops the least recently used entry. Reading an entry does not count as a use;
    call `move_to_end` to record the use.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def put(self, key: K, value: V) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._capacity:
            self.popitem(last=False)
