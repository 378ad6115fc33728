"""Ids that a server did not send, put back from the text it did send.

llama.cpp's server holds a token's event while the text ends in the middle of a character, and sends the whole
character with the last id alone. The text of an event is compared with the text of its ids: what it has more belongs
to ids that were held back, and is encoded together with them. Special tokens are kept as they are, shown or hidden.
"""

from __future__ import annotations

from unisono.core.generation import FIRST_SPECIAL
from unisono.harmony.encoding import Encoding


class LostIds:
    """Feed it the events of one stream in order."""

    __slots__ = ("_encoding", "_unshown")

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._unshown = b""
        """Text of ids that came before their text did: a server looking out for a stop string holds text back."""

    def restored(self, tokens: list[int], content: str) -> list[int]:
        """The ids of one event: `tokens` where they account for `content`, with the lost ones put back where not."""
        text = content.encode()
        spelled = self._encoding.decode_bytes(tokens)
        if text == spelled and not self._unshown:
            return tokens
        plain = [token for token in tokens if token < FIRST_SPECIAL]
        # A special token stands in the text, or is hidden as the one that ended generation is.
        hidden = self._encoding.decode_bytes(plain)
        expected = (self._unshown + spelled, self._unshown + hidden)
        if text in expected or content in [own.decode("utf-8", errors="replace") for own in expected]:
            self._unshown = b""
            return tokens
        if expected[1].startswith(text):
            self._unshown = expected[1][len(text) :]
            return tokens
        self._unshown = b""
        return self._encoded_again(tokens, text)

    def _encoded_again(self, tokens: list[int], text: bytes) -> list[int]:
        """Ordinary ids of `text`, then the special ones of `tokens`, whose spelling at its end is theirs."""
        special = [token for token in tokens if token >= FIRST_SPECIAL]
        body = text.removesuffix(self._encoding.decode_bytes(special)) if special else text
        return [*self._encoding.encode_text(body.decode("utf-8", errors="replace")), *special]
