"""Incomplete characters at the end of a token sequence."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Final

from unisono.core.generation import FIRST_SPECIAL
from unisono.harmony.encoding import Encoding

MAX_CHARACTER_TOKENS: Final = 4  # tokens that a character may have

TAIL_TOKENS: Final = 16  # tokens that determine whether the last character is complete


def unfinished(encoding: Encoding, tokens: Sequence[int]) -> int:
    """Return the number of tokens at the end that begin an incomplete character.

    The number is 0 if the last character is complete, or if the tokens before it are incomplete too.
    """
    last = tokens[-TAIL_TOKENS:]
    if not _ends_inside(encoding, last):
        return 0
    for begun in range(1, min(MAX_CHARACTER_TOKENS, len(last)) + 1):
        if last[-begun] >= FIRST_SPECIAL:
            return 0
        if not _ends_inside(encoding, last[:-begun]):
            return begun
    return 0


def _ends_inside(encoding: Encoding, tokens: Sequence[int]) -> bool:
    decoder = getincrementaldecoder("utf-8")("replace")
    decoder.decode(encoding.decode_bytes(tokens))
    return bool(decoder.getstate()[0])
