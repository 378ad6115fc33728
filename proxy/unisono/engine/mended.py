"""Generated tokens for display, split at the positions of the repairs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from unisono.core.events import Repaired
from unisono.engine.journal import JournalEntry, JournalMarker, Part, TokenSource

Piece: TypeAlias = "Sequence[int] | Repaired"


def with_repairs(parts: Iterable[Part], repairs: Iterable[Repaired]) -> Iterator[Part | Repaired]:
    """Yield the parts of a journal with all repairs; repairs after the last token come last."""
    waiting = deque(repairs)
    position = 0
    for part in parts:
        if isinstance(part, TokenSource | JournalEntry | JournalMarker):
            yield part
        else:
            yield from mended(part, waiting, position)
            position += len(part)
    yield from waiting


def mended(tokens: Sequence[int], waiting: deque[Repaired], position: int = 0) -> Iterator[Piece]:
    """Split tokens that begin at `position` at the waiting repairs.

    Repairs up to the end of the tokens are yielded and removed from `waiting`.
    """
    shown = 0
    while waiting and waiting[0].position <= position + len(tokens):
        upto = max(waiting[0].position - position, shown)
        yield tokens[shown:upto]
        yield waiting.popleft()
        shown = upto
    yield tokens[shown:]
