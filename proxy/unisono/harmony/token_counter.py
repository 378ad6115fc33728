"""Number of output tokens of one answer, as the model's own tokenizer splits the text."""

from __future__ import annotations

from unisono.core.events import Item, Reasoning
from unisono.harmony.encoding import Encoding
from unisono.harmony.message_parts import OpenPart


class TokenCounter:
    """Counter of the output tokens of one answer, over all of its generations.

    With `canonical`, headers and bodies are encoded again, for backends whose ids are guesses. It may be set at any
    time.
    """

    # Rules.
    # - A token counts when it arrives.
    # - The network may split text anywhere, so the tokens of single chunks are not canonical.
    # - A header is encoded again when it is complete, and a body when it is closed. The count then follows them.

    def __init__(self, encoding: Encoding, *, canonical: bool) -> None:
        self._encoding = encoding
        self.canonical = canonical
        self.completion = 0
        self.reasoning = 0

    def header(self, part: OpenPart) -> tuple[int, ...]:
        """Return the tokens of a header, re-encoded as one if they came as text."""
        if not (self.canonical and part.header.verbatim):
            return part.tokens
        tokens = tuple(self._encoding.encode_marked(self._encoding.decode(part.tokens)))
        self.completion += len(tokens) - len(part.tokens)
        return tokens

    def body(self, item: Item, body: list[int], text: str) -> list[int]:
        """Return the tokens of a body with this text, re-encoded if ids are guesses."""
        if not self.canonical:
            return body
        canonical = self._encoding.encode_generated(text)
        more = len(canonical) - len(body)
        self.completion += more
        if isinstance(item, Reasoning):
            self.reasoning += more
        return canonical
