"""Limit to `max_tokens`, and counts of output tokens, in tokens of the model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.events import Item, Reasoning
from unisono.core.generation import FIRST_SPECIAL
from unisono.harmony.encoding import Encoding
from unisono.harmony.gate_protocol import OpenPart


class TokenCap:
    """Limit of one generation to `max_tokens` tokens.

    The limit is enforced even if the backend ignores it. The limit is exceeded when `room` is below 0. `guessed` means
    that the decoder made the tokens from text, so their number is only an estimate.
    """

    # Token ids are counted on arrival. Tokens made from text end wherever a chunk ends, so there are more of them than
    # the model generated. When their number exceeds the limit, the whole text is encoded again and the result is
    # counted. This is rare enough that the work stays linear.

    def __init__(self, encoding: Encoding, max_tokens: int, *, guessed: bool) -> None:
        self._encoding = encoding
        self._max_tokens = max_tokens
        self._is_guessed = guessed
        self._seen: list[int] = []  # all tokens, if they are guessed
        # Number of tokens that may still arrive before the limit is exceeded. For guessed tokens: before the whole text
        # is encoded again to check the limit.
        self.room = max_tokens

    def within_limit(self, tokens: Sequence[int]) -> Sequence[int]:
        """Count the tokens that arrived, and return those within the limit.

        Guessed tokens are all returned, even if they exceed the limit.
        """
        self.room -= len(tokens)
        if not self._is_guessed:
            return tokens if self.room >= 0 else tokens[: self.room]
        self._seen.extend(tokens)
        if self.room < 0:
            # The model's tokens are at most as many as the guessed ones, so the limit cannot be exceeded before that
            # many more guessed tokens arrive.
            self.room = self._max_tokens - self._made()
        return tokens

    def tokens_to_encode(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens whose text `within_limit(tokens)` would encode again."""
        # The text is encoded again only when the guessed count may have passed the limit.
        is_due = self._is_guessed and len(tokens) > self.room
        return len(self._seen) + len(tokens) if is_due else 0

    def _made(self) -> int:
        ordinary = [token for token in self._seen if token < FIRST_SPECIAL]
        return len(self._seen) - len(ordinary) + len(self._encoding.encode_generated(self._encoding.decode(ordinary)))


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
