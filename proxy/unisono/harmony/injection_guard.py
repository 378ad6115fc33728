"""The defence of backends that take the prompt as text and tokenise it themselves, control tokens included.

Two layers. Text from outside is neutralised: nothing in it spells a control token any more. Then a gate compares the
structure that the backend will see with the structure that was rendered; a prompt that differs is never sent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unisono.errors import InvalidRequest
from unisono.harmony.encoding import Encoding

ZERO_WIDTH_SPACE = "\u200b"
_SPELLED = re.compile(r"<(?=\|[^<>|]{0,128}\|>)")


def neutralise(text: str) -> str:
    """The text with U+200B between `<` and `|` of every `<|name|>`; unchanged when there is none."""
    return _SPELLED.sub("<" + ZERO_WIDTH_SPACE, text) if "<|" in text else text


def check_structure(encoding: Encoding, text: str, tokens: Sequence[int]) -> None:
    """Raises InvalidRequest unless a server that tokenises `text` sees the control tokens of `tokens`, no others."""
    if Encoding.special_ids(encoding.encode_as_server(text)) != Encoding.special_ids(tokens):
        raise InvalidRequest("A message spells control tokens in a way that cannot be sent to this model safely.")
