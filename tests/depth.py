"""Number of examples for property tests.

`make test` runs a few fixed examples, so that its result depends on the commit only. `make test-deep` runs as many
random examples as requested.
"""

from __future__ import annotations

import os
from typing import Final

# Factor for the number of examples in a deep run; 0 in a quick run.
DEEP: Final = float(os.environ.get("TEST_DEPTH", "0"))
# Factor for the number of examples in a quick run.
_QUICK_FACTOR: Final = 0.15


def examples(number: int) -> int:
    """Scale the number of examples of a property test; the minimum is 10."""
    return max(10, round(number * (DEEP or _QUICK_FACTOR)))


def cuts(first: int, end: int) -> range:
    """Cut positions from `first` to before `end`: every third, or all in a deep run."""
    return range(first, end, 1 if DEEP else 3)
