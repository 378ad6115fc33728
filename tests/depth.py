"""How many examples properties are tried with: a few that are always the same in `make test`, so that its verdict is
the commit's and nothing else's; as many as one likes, and others every time, in `make test-deep`."""

from __future__ import annotations

import os
from typing import Final

DEEP: Final = float(os.environ.get("TEST_DEPTH", "0"))
"""How many times the examples that a property is to be tried with in earnest; 0 for the few."""
_FEW: Final = 0.25


def examples(number: int) -> int:
    """As many as `number` comes to."""
    return max(10, round(number * (DEEP or _FEW)))


def cuts(first: int, end: int) -> range:
    """Places to cut something at, from `first` to before `end`: every third, and every one in depth."""
    return range(first, end, 1 if DEEP else 3)
