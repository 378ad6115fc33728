"""Restoration of ids that a server omits, from the text it sends.

While the text ends inside a character, llama.cpp's server holds back the token's event. It then sends the whole
character with the last id only. Comparing an event's text with the text of its ids shows the omitted part,
which is encoded together with them. Special tokens stay unchanged, visible or hidden.
"""

from __future__ import annotations

from unisono.core.generation import FIRST_SPECIAL
from unisono.harmony.encoding import Encoding


class LostIds:
    """Restorer for one stream, whose events must be fed in order."""

    __slots__ = ("_encoding", "_pending")

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        # Text of ids that arrived before it: a server checking for a stop string holds text back.
        self._pending = b""

    def restored(self, tokens: list[int], content: str) -> list[int]:
        """Return the ids of one event, with lost ones restored if `tokens` do not match `content`."""
        text = content.encode()
        spelled = self._encoding.decode_bytes(tokens)
        if text == spelled and not self._pending:
            return tokens
        plain = [token for token in tokens if token < FIRST_SPECIAL]
        # A special token is in the text, or hidden like the one that ended generation.
        hidden = self._encoding.decode_bytes(plain)
        expected = (self._pending + spelled, self._pending + hidden)
        if text in expected or content in [own.decode("utf-8", errors="replace") for own in expected]:
            self._pending = b""
            return tokens
        if expected[1].startswith(text):
            self._pending = expected[1][len(text) :]
            return tokens
        self._pending = b""
        return self._reencode(tokens, text)

    def _reencode(self, tokens: list[int], text: bytes) -> list[int]:
        """Return ordinary ids of `text`, then the special ids of `tokens`, which end the text."""
        special = [token for token in tokens if token >= FIRST_SPECIAL]
        body = text.removesuffix(self._encoding.decode_bytes(special)) if special else text
        return [*self._encoding.encode_text(body.decode("utf-8", errors="replace")), *special]
