"""Injection guard for backends that tokenise text prompts, including control tokens.

It has two layers. Outside text is neutralised, so that it spells no control token. Then the structure that the
backend will see is compared with the rendered one; a prompt that differs is never sent.
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
    """Check that a server that tokenises `text` sees exactly the control tokens of `tokens`.

    Raises InvalidRequest otherwise.
    """
    if Encoding.special_ids(encoding.encode_as_server(text)) != Encoding.special_ids(tokens):
        raise InvalidRequest(
            "A message contains spelled control tokens that cannot be sent to this model safely; remove them."
        )
