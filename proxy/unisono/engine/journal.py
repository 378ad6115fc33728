"""A journal: the tokens of an answer in the order they were read, and between them the marks that it takes to read them
again to the same events.

What a token means depends on three things that are not in the tokens: where a step ended, whether the ids are the
model's own or guesses made from text, and whether the backend shows the token it stops at. The first has
`STEP_ENDED`; a change of the other two has a mark of its own. A backend that gives ids and shows its stops needs none.

What the gateway did itself between two steps is in no token at all. It stands there as notes: JSON, its bytes three to
a number behind a mark and their count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

from unisono.core.conversation import Json
from unisono.core.generation import Capabilities, OutputForm
from unisono.engine.turn import STEP_ENDED
from unisono.errors import StoreUnreadable

FIRST_MARK: Final = 0xFFFF_FFF0
"""Numbers from here on are marks; far above every token's id, and still of 32 bits."""
NOTE: Final = FIRST_MARK + 8
NOTED: Final = "noted"
"""The key of a note that is whoever's who started the turn; nothing of the answer follows from it."""
PACKED: Final = 3
"""Bytes of a note to a number: no such number can be a mark."""


@dataclass(frozen=True, slots=True)
class TokenSource:
    """How tokens come from a backend. `guessed`: made from its text. `stop_hidden`: without the one it stops at."""

    guessed: bool = False
    stop_hidden: bool = False

    @classmethod
    def of(cls, capabilities: Capabilities) -> TokenSource:
        return cls(capabilities.output is not OutputForm.IDS, not capabilities.stop_visible)

    @property
    def mark(self) -> int:
        return FIRST_MARK + 2 * self.guessed + self.stop_hidden


WAYS: Final = {
    way.mark: way for way in (TokenSource(guessed, hidden) for guessed in (False, True) for hidden in (False, True))
}


class JournalMarker(Enum):
    STEP_ENDED = auto()


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Something that no token says, as a JSON object."""

    value: Mapping[str, Json]

    def numbers(self) -> list[int]:
        """How it stands in a journal."""
        text = json.dumps(self.value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        data = text.encode("utf-8", "surrogatepass")
        padded = data + bytes(-len(data) % PACKED)
        packed = [a << 16 | b << 8 | c for a, b, c in zip(padded[::3], padded[1::3], padded[2::3], strict=True)]
        return [NOTE, len(data), *packed]


Part: TypeAlias = "Sequence[int] | TokenSource | JournalEntry | JournalMarker"


def parts_of(journal: Sequence[int]) -> Iterator[Part]:
    """A journal in its parts: runs of tokens, none empty, and what stands between them; what nobody knows is passed
    over. Raises StoreUnreadable for a note that is none."""
    begin = 0
    for at in [at for at, number in enumerate(journal) if number >= FIRST_MARK]:
        if at > begin:
            yield journal[begin:at]
        begin = at + 1
        if journal[at] == STEP_ENDED:
            yield JournalMarker.STEP_ENDED
        elif journal[at] == NOTE:
            note, begin = _note_at(journal, at)
            yield note
        elif journal[at] in WAYS:
            yield WAYS[journal[at]]
    if begin < len(journal):
        yield journal[begin:]


def generated_in(journal: Sequence[int]) -> int:
    """Number of tokens in a journal. Raises StoreUnreadable for a damaged note."""
    return sum(len(part) for part in parts_of(journal) if isinstance(part, Sequence))


def noted_in(journal: Sequence[int]) -> Mapping[str, Json] | None:
    """What the turn's `noted` was when the journal was begun; None for nothing. Raises StoreUnreadable."""
    first = next(parts_of(journal), None)
    noted = first.value.get(NOTED) if isinstance(first, JournalEntry) else None
    return noted if isinstance(noted, dict) else None


def _note_at(journal: Sequence[int], at: int) -> tuple[JournalEntry, int]:
    """The note whose mark is at `at`, and where the next part begins."""
    size = journal[at + 1] if at + 1 < len(journal) else 0
    end = at + 2 + -(-size // PACKED)
    try:
        data = b"".join(number.to_bytes(PACKED, "big") for number in journal[at + 2 : end])[:size]
        value = json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, OverflowError, RecursionError) as failure:
        raise StoreUnreadable("A note in what was generated so far cannot be read.") from failure
    if not isinstance(value, dict):
        raise StoreUnreadable("A note in what was generated so far cannot be read.")
    return JournalEntry(value), end
