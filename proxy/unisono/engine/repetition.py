"""Endless repetition: a model that says the same few tokens over and over never stops by itself.

Cheap, because it is only looked for every `STRIDE` tokens and nearly every look ends at the first few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

STRIDE: Final = 128
"""So many tokens are generated between two looks."""
LONGEST_PERIOD: Final = 64
"""Tokens that are repeated."""
LENGTH: Final = 512
"""Tokens that have to be a repetition of what is a period before them."""

SEEN: Final = LENGTH + LONGEST_PERIOD
"""How many of the last tokens are looked at."""


def repeats(tokens: Sequence[int]) -> bool:
    """Whether the last tokens of a generation repeat themselves."""
    if len(tokens) < LENGTH + 1:
        return False
    tail = tokens[-SEEN:]
    last = tail[-1]
    return any(
        tail[-1 - period] == last and tail[-LENGTH:] == tail[-LENGTH - period : -period]
        for period in range(1, min(LONGEST_PERIOD, len(tail) - LENGTH) + 1)
    )
