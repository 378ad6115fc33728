"""Retokenization of generated text, as the model's own tokenizer would split it.

Tokens that were made from a backend's text are split wherever the network split the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.generation import FIRST_SPECIAL
from unisono.harmony.encoding import Encoding
from unisono.harmony.raw_codec import unfinished


def retokenized(encoding: Encoding, tokens: Sequence[int]) -> list[int]:
    """Split the text between the control tokens again, as the model's own tokenizer would.

    The control tokens stay, and so do the tokens of an incomplete character at the end.
    """
    # An incomplete character cannot be decoded to text and encoded again.
    end = len(tokens) - unfinished(encoding, tokens)
    whole, rest = tokens[:end], tokens[end:]
    exact: list[int] = []
    begin = 0
    for at in [at for at, token in enumerate(whole) if token >= FIRST_SPECIAL]:
        exact += (*encoding.encode_generated(encoding.decode(whole[begin:at])), whole[at])
        begin = at + 1
    return [*exact, *encoding.encode_generated(encoding.decode(whole[begin:])), *rest]
