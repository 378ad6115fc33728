"""Whose turn it is, where nothing else makes one candidate better than another: pure, and the same in every process.

By a key that requests have in common, or one after the other; either way as often as the weights say.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from math import gcd, log
from typing import Final, Protocol, TypeVar

MASK: Final = 2**64 - 1
MIXERS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The multipliers of splitmix64, which spread every bit of a number over all others."""


class _Weighed(Protocol):
    """What takes turns: `seed` is of its name (`number_of`), `weight` its share."""

    seed: int
    weight: float


Weighed = TypeVar("Weighed", bound=_Weighed)


def number_of(text: str) -> int:
    """64 bits that stand for a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def mixed(number: int) -> int:
    """64 bits of which each depends on all of `number`'s, whatever pattern those have."""
    first, second = MIXERS
    number = ((number ^ (number >> 30)) * first) & MASK
    return ((number ^ (number >> 27)) * second) & MASK


def favourite(key: int, candidates: Sequence[Weighed]) -> Weighed:
    """The candidate whose turn it is for whatever `key` stands for; the same in every process.

    Over many keys each candidate comes first as often as its weight says. One that is added or removed takes or leaves
    its own keys only (rendezvous hashing).
    """
    mixer, begun = MIXERS[0], mixed(key)
    most: dict[float, int] = {}
    firsts: dict[float, Weighed] = {}
    for c in candidates:
        # One step for each is enough, since both numbers are mixed already. Of one weight the largest is first, so a
        # logarithm is needed for each weight and not for each candidate.
        bits = ((begun ^ c.seed) * mixer) & MASK
        if bits > most.get(c.weight, -1):
            most[c.weight], firsts[c.weight] = bits, c
    best, soonest = candidates[0], float("inf")
    for weight, bits in most.items():
        # The time at which a clock of rate `weight` first rings: the first of several rings is a candidate's by the
        # share of its weight, and no clock knows of another. Never 0, of which there is no logarithm, and never 1.
        rings = -log((bits + 0.5) / 2.0**64) / weight
        if rings < soonest:
            best, soonest = firsts[weight], rings
    return best


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
