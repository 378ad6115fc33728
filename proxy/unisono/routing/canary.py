"""Canaries: deployments that get a fixed share of the requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.routing.tie_break import MASK, number_of

# Canaries of a group as pairs: the bit of the deployment, and its share of the requests (0 to 1).
Canaries = Sequence[tuple[int, float]]


def draw_of(sticky: str, drawn: float) -> float:
    """Return the number from 0 to 1 that decides whether a request goes to a canary.

    Requests with the same `sticky` value get the same number. Without `sticky`, the random number `drawn` is returned.
    """
    return number_of(f"canary {sticky}") / (MASK + 1) if sticky else drawn


def masks(canaries: Canaries, draw: float) -> tuple[int, int]:
    """Return the mask of the canary that gets a request (0 for none), and of the other canaries."""
    preferred, avoided, end = 0, 0, 0.0
    for bit, share in canaries:
        begin, end = end, end + share
        if begin <= draw < end:
            preferred = bit
        else:
            avoided |= bit
    return preferred, avoided
