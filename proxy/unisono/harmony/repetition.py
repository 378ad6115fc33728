"""Detection of endless repetition in generated tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# A model that repeats the same tokens does not stop by itself. The gateway ends only a long, exact repetition without a
# gap, because tables of equal rows, lists of zeros and padded data are valid answers. Reasoning is not data, so a
# shorter repetition is enough there. The check is cheap: it runs every `CHECK_INTERVAL_TOKENS` tokens, usually compares
# only a few tokens, and compares all of them at most once.

CHECK_INTERVAL_TOKENS: Final = 256  # number of tokens between two checks
MAX_PERIOD_TOKENS: Final = 64  # longest sequence of tokens whose repetition is detected
# Number of tokens, each of which must equal the token one period earlier. The period then occurs at least 65 times.
REPEAT_TOKENS: Final = 4096
REASONING_REPEAT_TOKENS: Final = 512  # the same for reasoning


def repeats(tokens: Sequence[int], begin: int, length: int = REPEAT_TOKENS) -> bool:
    """Return whether `tokens[begin:]` ends with a repetition of at least `length` tokens.

    `length` must be a multiple of `MAX_PERIOD_TOKENS`.
    """
    size = len(tokens)
    if size - begin <= length:
        return False
    last = tokens[-1]
    before = tokens[-1 - MAX_PERIOD_TOKENS : -1]
    # Usually, the last token does not occur among the tokens just before it, so there is no repetition.
    if last not in before:
        return False
    few = tokens[-MAX_PERIOD_TOKENS:]
    for period in range(1, MAX_PERIOD_TOKENS + 1):
        if before[-period] == last and tokens[size - MAX_PERIOD_TOKENS - period : size - period] == few:
            # This is the shortest period that fits the last few tokens. Longer periods need no check: if a longer
            # period fitted the whole length, this period would fit too.
            return size - begin >= length + period and tokens[-length:] == tokens[-length - period : -period]
    return False
