"""Tokens of generated text as the model's own tokenizer makes them.

Tokens that were made from the text of a backend are cut where the network cut the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.generation import FIRST_SPECIAL
from unisono.harmony.encoding import Encoding
from unisono.harmony.raw_codec import unfinished


def retokenized(encoding: Encoding, tokens: Sequence[int]) -> list[int]:
    """Return the same text between the same control tokens, cut as by the model's tokenizer."""
    # An incomplete character is not text that can be cut again.
    end = len(tokens) - unfinished(encoding, tokens)
    whole, rest = tokens[:end], tokens[end:]
    exact: list[int] = []
    begin = 0
    for at in [at for at, token in enumerate(whole) if token >= FIRST_SPECIAL]:
        exact += (*encoding.encode_generated(encoding.decode(whole[begin:at])), whole[at])
        begin = at + 1
    return [*exact, *encoding.encode_generated(encoding.decode(whole[begin:])), *rest]
