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

FEW: Final = 24
"""Tokens that are compared before all are."""

SEEN: Final = LENGTH + LONGEST_PERIOD
"""How many of the last tokens are looked at."""


def repeats(tokens: Sequence[int]) -> bool:
    """Whether the last tokens of a generation repeat themselves."""
    if len(tokens) < LENGTH + 1:
        return False
    last = tokens[-1]
    before = tokens[-1 - LONGEST_PERIOD : -1]
    # Most often the last token is the first of its kind for a while.
    if last not in before:
        return False
    periods = [len(before) - at for at, token in enumerate(before) if token == last]
    return any(
        tokens[-FEW:] == tokens[-FEW - period : -period] and tokens[-LENGTH:] == tokens[-LENGTH - period : -period]
        for period in periods
        if period <= len(tokens) - LENGTH
    )
