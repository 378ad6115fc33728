"""Shared objects for token ids, so that messages and answers do not hold their own copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from unisono.core.generation import VOCABULARY


class SharedIds(dict[int, int]):
    """Table of shared ids, filled on demand: a process sees a small part of the vocabulary."""

    def __missing__(self, token: int) -> int:
        # An id outside the vocabulary, which only a broken backend sends, stays as it is.
        if 0 <= token < VOCABULARY:
            self[token] = token
        return token


_SHARED_ID: Final = SharedIds().__getitem__


def share_ids(tokens: Sequence[int]) -> list[int]:
    """Return equal ids as objects shared by the process: 8 bytes per reference instead of 40."""
    return [_SHARED_ID(tokens[0])] if len(tokens) == 1 else [*map(_SHARED_ID, tokens)]
