"""Text of the bodies of messages, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from unisono.harmony.encoding import Encoding

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
TRUNCATED: Final = "unexpected end of data"  # reason of a UnicodeDecodeError for an incomplete character


class BodyText(Protocol):
    """Reader of one message after another; bytes of an incomplete character are withheld."""

    def start(self, body: Sequence[int] = ()) -> None:
        """Begin a message that continues after `body`."""

    def text_of(self, token: int) -> str | None:
        """Return the text that one more token completes."""

    def end(self) -> None:
        """End the message."""


class TableBodyText:
    """Reader that looks up the text of each token in the vocabulary.

    It returns the same texts as openai-harmony's parser, also for bytes that are not UTF-8.
    """

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._texts = encoding.texts
        self._withheld = b""

    def start(self, body: Sequence[int] = ()) -> None:
        self._withheld = b""
        for token in body:
            self.text_of(token)

    def text_of(self, token: int) -> str | None:
        if not self._withheld:
            text = self._texts[token]
            if text is not None:
                return text
        return self._decoded(token)

    def _decoded(self, token: int) -> str | None:
        before = self._withheld
        data = before + self._encoding.decode_bytes((token,))
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            text = data[: error.start].decode()
            if error.reason == TRUNCATED:
                self._withheld = data[error.start :]
                return text or None
            # The parser replaces only the first invalid bytes, and reads the rest with the next token.
            self._withheld = data[error.end :]
            return text + REPLACEMENT
        self._withheld = b""
        if not before:
            self._texts[token] = text
        return text

    def end(self) -> None:
        self._withheld = b""
