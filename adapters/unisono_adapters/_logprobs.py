"""Log probabilities in the answers of engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

from unisono.core.generation import VOCABULARY, TokenLogprob


def to_logprob(token: int, value: object, alternatives: Iterable[tuple[object, object]] = ()) -> TokenLogprob | None:
    """Return the log probability of a token, with its alternatives, the most probable first.

    None if `value` is not a number. `alternatives` are ids and log probabilities. Invalid ones are left out.
    """
    if not _is_number(value):
        return None
    ranked = [(other, float(each)) for other, each in alternatives if _is_token(other) and _is_number(each)]
    return TokenLogprob(token, float(value), tuple(sorted(ranked, key=lambda one: -one[1])))


def _is_token(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < VOCABULARY


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)
