"""Counting of output tokens, in the tokens of the model's own tokenizer."""

from __future__ import annotations

from unisono.core.events import Item, Reasoning
from unisono.harmony.encoding import Encoding
from unisono.harmony.gate_protocol import OpenPart


class TokenCounter:
    """Counter of reasoning tokens, and of corrections to the output tokens, of one answer.

    The counts include all generations of the answer. `canonical` means that the backend sent text, so that the tokens
    that the decoder made from the text are guesses. In that case, the router encodes the text again with `header` and
    `body`. `canonical` may be changed at any time.
    """

    # Rules.
    # - The router counts each token when it arrives.
    # - The network may split text anywhere, so the tokens of single chunks are not those of the model's tokenizer.
    # - A header is encoded again when it is complete, and a body when it is closed. The counts are then corrected.

    def __init__(self, encoding: Encoding, *, canonical: bool) -> None:
        self._encoding = encoding
        self.canonical = canonical
        self.corrections = 0  # output tokens in addition to those that arrived; negative if there are fewer
        self.hidden_stops = 0  # stop tokens of the current step that the backend did not send
        self.reasoning = 0

    def header(self, part: OpenPart) -> tuple[int, ...]:
        """Return the tokens of a header, encoded again unless repair wrote the header."""
        if not part.header.verbatim:
            return part.tokens
        tokens = tuple(self._encoding.encode_marked(self._encoding.decode(part.tokens)))
        self.corrections += len(tokens) - len(part.tokens)
        return tokens

    def body(self, item: Item, text: str, counted: int) -> list[int]:
        """Encode the text of a body again, correct the counts, and return the new tokens.

        `counted` is the number of tokens that arrived for this body.
        """
        canonical = self._encoding.encode_generated(text)
        more = len(canonical) - counted
        self.corrections += more
        if isinstance(item, Reasoning):
            self.reasoning += more
        return canonical
