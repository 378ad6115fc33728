"""Endless repetition: a model that says the same few tokens over and over never stops by itself.

What counts is an exact repetition without a gap, and a long one: a table of equal rows, a list of zeros and padded data
are answers too. In thoughts, which nobody reads as data, less of it is enough. Cheap, because it is only looked for
every `STRIDE` tokens, nearly every look ends at the first few of them, and none looks at them all more than once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

STRIDE: Final = 256
"""So many tokens are generated between two looks."""
LONGEST_PERIOD: Final = 64
"""Tokens that are repeated."""
LENGTH: Final = 4096
"""Tokens that have to be a repetition of what is a period before them: the same at least 65 times."""
LENGTH_OF_THOUGHTS: Final = 512


def repeats(tokens: Sequence[int], begin: int, length: int = LENGTH) -> bool:
    """Whether the last tokens of a generation, which begins at `begin`, repeat themselves over `length` tokens, a
    multiple of the longest period."""
    size = len(tokens)
    if size - begin <= length:
        return False
    last = tokens[-1]
    before = tokens[-1 - LONGEST_PERIOD : -1]
    # Most often the last token is the first of its kind for a while.
    if last not in before:
        return False
    few = tokens[-LONGEST_PERIOD:]
    for period in range(1, LONGEST_PERIOD + 1):
        if before[-period] == last and tokens[size - LONGEST_PERIOD - period : size - period] == few:
            # Where a longer period held for as long as any, the shortest one that holds for a few would hold too.
            return size - begin >= length + period and tokens[-length:] == tokens[-length - period : -period]
    return False
