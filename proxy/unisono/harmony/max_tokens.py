"""Limit of a generation to `max_tokens`, in the tokens of the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.generation import FIRST_SPECIAL
from unisono.harmony.encoding import Encoding


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
