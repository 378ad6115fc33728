"""Conversion of the log probabilities that backends report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

from unisono.core.generation import VOCABULARY, TokenLogprob


def to_logprob(token: int, value: object, alternatives: Iterable[tuple[object, object]] = ()) -> TokenLogprob | None:
    """Return the log probability of a token and its alternatives.

    The most probable alternative comes first. `alternatives` are pairs of token id and log probability; invalid pairs
    are left out. Returns None if `value`, the log probability of the token, is not a number.
    """
    if not _is_number(value):
        return None
    ranked = [(other, float(each)) for other, each in alternatives if _is_token(other) and _is_number(each)]
    return TokenLogprob(token, float(value), tuple(sorted(ranked, key=lambda one: -one[1])))


def _is_token(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < VOCABULARY


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)
