"""Characters that take several tokens, and what there is of the last one: half a character is no text."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Final

from unisono.core.generation import FIRST_SPECIAL
from unisono.harmony.encoding import Encoding

LONGEST: Final = 4
"""Tokens that a character may take."""

LOOKED_AT: Final = 16
"""So many tokens say whether the last character is whole."""


def unfinished(encoding: Encoding, tokens: Sequence[int]) -> int:
    """How many of the last tokens it takes to begin the character that they end inside of; 0 where it is whole, or
    nothing before them is."""
    last = tokens[-LOOKED_AT:]
    if not _ends_inside(encoding, last):
        return 0
    for begun in range(1, min(LONGEST, len(last)) + 1):
        if last[-begun] >= FIRST_SPECIAL:
            return 0
        if not _ends_inside(encoding, last[:-begun]):
            return begun
    return 0


def _ends_inside(encoding: Encoding, tokens: Sequence[int]) -> bool:
    decoder = getincrementaldecoder("utf-8")("replace")
    decoder.decode(encoding.decode_bytes(tokens))
    return bool(decoder.getstate()[0])
