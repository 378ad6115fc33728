"""What was generated as it is shown to somebody: the runs of tokens, and among them what was mended, where that was
decided."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from unisono.core.events import Repaired
from unisono.engine.journal import JournalEntry, JournalMarker, Part, TokenSource

Piece: TypeAlias = "Sequence[int] | Repaired"


def with_repairs(parts: Iterable[Part], repairs: Iterable[Repaired]) -> Iterator[Part | Repaired]:
    """The parts of a journal with all the repairs: what was decided behind the last token comes last."""
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
    """Tokens that are generated behind `position`, in runs, and of the repairs that wait those that were decided up to
    their end, which are taken out."""
    shown = 0
    while waiting and waiting[0].position <= position + len(tokens):
        upto = max(waiting[0].position - position, shown)
        yield tokens[shown:upto]
        yield waiting.popleft()
        shown = upto
    yield tokens[shown:]
