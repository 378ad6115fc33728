"""A journal: the tokens of an answer in the order they were read, and between them the marks that it takes to read them
again to the same events.

What a token means depends on three things that are not in the tokens: where a step ended, whether the ids are the
model's own or guesses made from text, and whether the backend shows the token it stops at. The first has
`STEP_ENDED`; a change of the other two has a mark of its own. A backend that gives ids and shows its stops needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

from unisono.core.generation import Capabilities, Form
from unisono.engine.turn import STEP_ENDED

FIRST_MARK: Final = 0xFFFF_FFF0
"""Numbers from here on are marks; far above every token's id, and still of 32 bits."""


@dataclass(frozen=True, slots=True)
class Way:
    """How tokens come from a backend. `guessed`: made from its text. `stop_hidden`: without the one it stops at."""

    guessed: bool = False
    stop_hidden: bool = False

    @classmethod
    def of(cls, capabilities: Capabilities) -> Way:
        return cls(capabilities.output is not Form.IDS, not capabilities.stop_visible)

    @property
    def mark(self) -> int:
        return FIRST_MARK + 2 * self.guessed + self.stop_hidden


WAYS: Final = {way.mark: way for way in (Way(guessed, hidden) for guessed in (False, True) for hidden in (False, True))}


class Mark(Enum):
    STEP_ENDED = auto()


Part: TypeAlias = "Sequence[int] | Way | Mark"


def parts_of(journal: Sequence[int]) -> Iterator[Part]:
    """A journal in its parts: runs of tokens, none empty, and what stands between them; what nobody knows is passed
    over."""
    begin = 0
    for at in [at for at, number in enumerate(journal) if number >= FIRST_MARK]:
        if at > begin:
            yield journal[begin:at]
        if journal[at] == STEP_ENDED:
            yield Mark.STEP_ENDED
        elif journal[at] in WAYS:
            yield WAYS[journal[at]]
        begin = at + 1
    if begin < len(journal):
        yield journal[begin:]
