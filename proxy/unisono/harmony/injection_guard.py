"""Injection guard for backends that tokenize text prompts and read control tokens in them.

The guard has two layers. First, outside text is changed so that it spells no control token. Then the control tokens
that the backend will read are compared with those of the rendered prompt. A prompt that differs is never sent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unisono.errors import InvalidRequest
from unisono.harmony.encoding import Encoding

ZERO_WIDTH_SPACE = "\u200b"
_SPELLED = re.compile(r"<(?=\|[^<>|]{0,128}\|>)")


def neutralise(text: str) -> str:
    """Insert U+200B between `<` and `|` of every `<|name|>` in the text."""
    return _SPELLED.sub("<" + ZERO_WIDTH_SPACE, text) if "<|" in text else text


def check_structure(encoding: Encoding, text: str, tokens: Sequence[int]) -> None:
    """Check that a server that tokenizes `text` reads exactly the control tokens in `tokens`.

    Raises InvalidRequest if the control tokens differ.
    """
    if Encoding.special_ids(encoding.encode_as_server(text)) != Encoding.special_ids(tokens):
        raise InvalidRequest(
            "A message contains text that spells control tokens, and cannot be sent to this model safely; remove this "
            "text."
        )
