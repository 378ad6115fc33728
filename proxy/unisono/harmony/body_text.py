"""Conversion of the body tokens of messages to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from unisono.harmony.encoding import Encoding

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
TRUNCATED: Final = "unexpected end of data"  # reason of a UnicodeDecodeError for an incomplete character


class BodyText(Protocol):
    """Decoder that turns the body tokens of a message into text, one message after another.

    The bytes of an incomplete character are withheld until the character is complete.
    """

    def start(self, body: Sequence[int] = ()) -> None:
        """Discard what is withheld of the previous message, and begin the next message.

        `body` are the tokens of the new message that were read before; their text is not returned again.
        """

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text that the next `tokens` of the message complete."""


class TableBodyText:
    """Decoder that looks up the text of each token in the vocabulary.

    It returns the same texts as openai-harmony's parser, also for bytes that are not UTF-8.
    """

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._texts = encoding.texts
        self._withheld = b""

    def start(self, body: Sequence[int] = ()) -> None:
        self._withheld = b""
        if body:
            self.text_of(body)

    def text_of(self, tokens: Sequence[int]) -> str:
        if self._withheld:
            return "".join(map(self._decoded, tokens))
        # A slow stream delivers one token at a time.
        if len(tokens) == 1 and (known := self._texts.get(tokens[0])) is not None:
            return known
        try:
            return "".join(map(self._texts.__getitem__, tokens))
        except KeyError:  # the text of a token is not known yet, or the token is not a whole character
            return "".join(map(self._decoded, tokens))

    def _decoded(self, token: int) -> str:
        if not self._withheld and (known := self._texts.get(token)) is not None:
            return known
        before = self._withheld
        data = before + self._encoding.decode_bytes((token,))
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            text = data[: error.start].decode()
            if error.reason == TRUNCATED:
                self._withheld = data[error.start :]
                return text
            # Like openai-harmony's parser: replace only the first invalid bytes, and decode the rest with the next
            # token.
            self._withheld = data[error.end :]
            return text + REPLACEMENT
        self._withheld = b""
        if not before:
            self._texts[token] = text
        return text
