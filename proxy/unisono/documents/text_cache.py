"""Least recently used cache of the texts of files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Final

from unisono.core.input_files import FileText

MAX_CHARACTERS: Final = 16 * 1024 * 1024
# Size that each entry adds to that of its text, in characters.
ENTRY_CHARACTERS: Final = 1_000


class TextCache:
    """Cache whose entries may expire.

    `capacity` is the maximum size of all entries, in characters. `clock` returns seconds.
    """

    def __init__(self, capacity: int = MAX_CHARACTERS, clock: Callable[[], float] = monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[FileText, float]] = OrderedDict()
        self._size = 0

    def get(self, key: bytes) -> FileText | None:
        entry = self._entries.get(key)
        if entry is None or self._clock() >= entry[1]:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: bytes, text: FileText, lifetime_s: float = inf) -> None:
        """Store a text or a problem for `lifetime_s` seconds.

        An entry that is larger than the whole cache is not stored.
        """
        if _size(text) > self._capacity:
            return
        if (old := self._entries.pop(key, None)) is not None:
            self._size -= _size(old[0])
        self._entries[key] = (text, self._clock() + lifetime_s)
        self._size += _size(text)
        while self._size > self._capacity:
            _, (dropped, _) = self._entries.popitem(last=False)
            self._size -= _size(dropped)


def _size(text: FileText) -> int:
    return ENTRY_CHARACTERS + len(text.text)
