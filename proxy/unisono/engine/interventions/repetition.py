"""Detection of endless repetition.

A model that repeats the same tokens never stops by itself. Only a long, exact repetition without a gap counts: tables
of equal rows, lists of zeros and padded data are valid answers. For reasoning, which is not read as data, a shorter one
is enough. The check is cheap. It runs every `CHECK_INTERVAL_TOKENS` tokens, usually ends at the first few tokens, and
never reads them all more than once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

CHECK_INTERVAL_TOKENS: Final = 256  # tokens between two checks
MAX_PERIOD_TOKENS: Final = 64  # longest period in tokens
REPEAT_TOKENS: Final = 4096  # tokens that must repeat those one period earlier: at least 65 occurrences
REASONING_REPEAT_TOKENS: Final = 512


def repeats(tokens: Sequence[int], begin: int, length: int = REPEAT_TOKENS) -> bool:
    """Return whether the generation from `begin` ends in a repetition of `length` tokens.

    `length` must be a multiple of the longest period.
    """
    size = len(tokens)
    if size - begin <= length:
        return False
    last = tokens[-1]
    before = tokens[-1 - MAX_PERIOD_TOKENS : -1]
    # Usually the last token does not occur among the tokens just before it.
    if last not in before:
        return False
    few = tokens[-MAX_PERIOD_TOKENS:]
    for period in range(1, MAX_PERIOD_TOKENS + 1):
        if before[-period] == last and tokens[size - MAX_PERIOD_TOKENS - period : size - period] == few:
            # If a longer period held over the whole length, the shortest one that holds for these few tokens would hold
            # too.
            return size - begin >= length + period and tokens[-length:] == tokens[-length - period : -period]
    return False
