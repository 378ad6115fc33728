"""Restoration of token ids that llama.cpp's server leaves out of its events.

If a character consists of several tokens, the server sends one event with the whole character, but only with the id
of the last token. The text of such an event is longer than the text of its ids. The ids are then made anew by
encoding the text of the event. The ids of special tokens stay unchanged, whether their text is in the event or not.
"""

from __future__ import annotations

from unisono.core.generation import FIRST_SPECIAL
from unisono.harmony.encoding import Encoding


class LostIds:
    """Restoration of the lost ids of one stream.

    The events of the stream must be passed to `restored` in order.
    """

    __slots__ = ("_encoding", "_pending")

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        # Text of ids that have arrived before their text: a server that checks for a stop string holds text back.
        self._pending = b""

    def restored(self, tokens: list[int], content: str) -> list[int]:
        """Return the ids of one event; restore the lost ids if `tokens` do not match `content`."""
        text = content.encode()
        spelled = self._encoding.decode_bytes(tokens)
        if text == spelled and not self._pending:
            return tokens
        plain = [token for token in tokens if token < FIRST_SPECIAL]
        # `content` may leave out the text of a special token, as for the stop token that ended the generation.
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
        """Encode `text` without its special tokens, and append the special ids of `tokens`."""
        special = [token for token in tokens if token >= FIRST_SPECIAL]
        body = text.removesuffix(self._encoding.decode_bytes(special)) if special else text
        return [*self._encoding.encode_text(body.decode("utf-8", errors="replace")), *special]
