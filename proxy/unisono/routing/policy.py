"""In which order deployments are tried: pure, so that a table can test it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import gcd


def round_robin(weights: Sequence[int], turn: int) -> list[int]:
    """Indices of all candidates in the order to try them at the `turn`-th choice.

    Over `sum(weights)` turns each candidate comes first as often as its weight says; after it come the others in their
    configured order, wrapping around, so that whoever takes over is spread as well.
    """
    if not weights:
        return []
    shared = gcd(*weights)
    ends = list(accumulate(weight // shared for weight in weights))
    # Steps through the wheel by a stride that shares no factor with its size, so that a heavy candidate's turns are
    # spread out instead of coming in one run.
    size = ends[-1]
    place = turn * _stride(size) % size
    first = next(index for index, end in enumerate(ends) if place < end)
    count = len(weights)
    return [(first + offset) % count for offset in range(count)]


def _stride(size: int) -> int:
    """The first number from the golden section of `size` up that shares no factor with it."""
    return next(stride for stride in range(max(1, round(size * 0.618)), 2 * size + 2) if gcd(stride, size) == 1)
