"""Tie-breaking between equally good candidates. Pure, with the same result in every process.

A tie is broken by a key that requests have in common, or by round-robin. In both cases, each candidate is chosen in
proportion to its weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from math import gcd, log
from typing import Final, Protocol, TypeVar

MASK: Final = 2**64 - 1
# Multipliers of splitmix64, which spread every bit of a number over all others.
MIXERS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class _Weighed(Protocol):
    """Candidate with a `seed` derived from its name (`number_of`) and a `weight`."""

    seed: int
    weight: float


Weighed = TypeVar("Weighed", bound=_Weighed)


def number_of(text: str) -> int:
    """Return a 64-bit hash of a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def mixed(number: int) -> int:
    """Return a 64-bit number, each bit of which depends on all bits of `number`."""
    first, second = MIXERS
    number = ((number ^ (number >> 30)) * first) & MASK
    return ((number ^ (number >> 27)) * second) & MASK


def favourite(key: int, candidates: Sequence[Weighed]) -> Weighed:
    """Return the preferred candidate for `key`; the same in every process.

    Over many keys, each candidate is chosen in proportion to its weight. If a candidate is added or removed, only the
    keys that prefer it change (rendezvous hashing).
    """
    mixer, begun = MIXERS[0], mixed(key)
    most: dict[float, int] = {}
    firsts: dict[float, Weighed] = {}
    for c in candidates:
        # One mixing step is enough, since both numbers are mixed already. Among equal weights the largest value
        # wins, so a logarithm is needed per weight only, not per candidate.
        bits = ((begun ^ c.seed) * mixer) & MASK
        if bits > most.get(c.weight, -1):
            most[c.weight], firsts[c.weight] = bits, c
    best, soonest = candidates[0], float("inf")
    for weight, bits in most.items():
        # Time at which a clock of rate `weight` first rings. Of several independent clocks, each is the first to ring
        # in proportion to its weight. The fraction is never 0, which has no logarithm, and never 1.
        rings = -log((bits + 0.5) / 2.0**64) / weight
        if rings < soonest:
            best, soonest = firsts[weight], rings
    return best


def round_robin(weights: Sequence[int], turn: int) -> list[int]:
    """Return all indices in the order to try them at the `turn`-th choice.

    Over `sum(weights)` choices each candidate is first in proportion to its weight. The others follow in
    their configured order, wrapping around, so that failover is spread as well.
    """
    if not weights:
        return []
    shared = gcd(*weights)
    ends = list(accumulate(weight // shared for weight in weights))
    # The stride shares no factor with the wheel's size, so that the choices of a heavy candidate are spread out
    # instead of consecutive.
    size = ends[-1]
    place = turn * _stride(size) % size
    first = next(index for index, end in enumerate(ends) if place < end)
    count = len(weights)
    return [(first + offset) % count for offset in range(count)]


def _stride(size: int) -> int:
    """Return a number near the golden section of `size` that is coprime with `size`."""
    return next(stride for stride in range(max(1, round(size * 0.618)), 2 * size + 2) if gcd(stride, size) == 1)
