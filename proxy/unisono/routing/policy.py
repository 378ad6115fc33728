"""In which order deployments are tried, in turns or by what a turn belongs to: pure, so that a table can test it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from math import gcd, log


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


def rendezvous(key: str, names: Sequence[str], weights: Sequence[int]) -> list[int]:
    """Indices of all candidates in the order to try them for whatever `key` stands for; the same in every process.

    Over many keys each candidate comes first as often as its weight says. One that is added or removed changes
    nothing in the order of the others, so only its own keys move.
    """
    scores = [_score(key, name, weight) for name, weight in zip(names, weights, strict=True)]
    return sorted(range(len(scores)), key=scores.__getitem__)


def _score(key: str, name: str, weight: int) -> float:
    """The time at which a clock of rate `weight` first rings: the first of several rings is a candidate's by the share
    of its weight, and no clock knows of another."""
    sought = key.encode("utf-8", "surrogatepass")
    digest = blake2b(len(sought).to_bytes(8, "big") + sought + name.encode(), digest_size=8).digest()
    # Never 0, of which there is no logarithm, and never 1.
    return -log((int.from_bytes(digest, "big") + 0.5) / 2.0**64) / weight


def _stride(size: int) -> int:
    """The first number from the golden section of `size` up that shares no factor with it."""
    return next(stride for stride in range(max(1, round(size * 0.618)), 2 * size + 2) if gcd(stride, size) == 1)
