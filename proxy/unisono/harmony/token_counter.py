"""Number of output tokens as the model's own tokenizer splits the text, and its limit."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.events import Item, Reasoning
from unisono.core.generation import FIRST_SPECIAL
from unisono.harmony.encoding import Encoding
from unisono.harmony.message_parts import OpenPart


class TokenCounter:
    """Reasoning tokens of one answer, and corrections to its number of output tokens.

    Both are those of all its generations. With `canonical`, `header` and `body` encode the tokens again, for backends
    whose ids are guesses. It may be set at any time.
    """

    # Rules.
    # - A token counts when it arrives; the router counts the tokens that arrived.
    # - The network may split text anywhere, so the tokens of single chunks are not canonical.
    # - A header is encoded again when it is complete, and a body when it is closed. The count then follows them.

    def __init__(self, encoding: Encoding, *, canonical: bool) -> None:
        self._encoding = encoding
        self.canonical = canonical
        self.corrections = 0  # output tokens in addition to those that arrived; negative if there are fewer
        self.reasoning = 0

    def header(self, part: OpenPart) -> tuple[int, ...]:
        """Return the tokens of a header, re-encoded if they came as text."""
        if not part.header.verbatim:
            return part.tokens
        tokens = tuple(self._encoding.encode_marked(self._encoding.decode(part.tokens)))
        self.corrections += len(tokens) - len(part.tokens)
        return tokens

    def body(self, item: Item, text: str, counted: int) -> list[int]:
        """Return the re-encoded tokens of a body with this text, of which `counted` tokens arrived."""
        canonical = self._encoding.encode_generated(text)
        more = len(canonical) - counted
        self.corrections += more
        if isinstance(item, Reasoning):
            self.reasoning += more
        return canonical


class TokenCap:
    """Limit of one generation to `max_tokens` tokens.

    It holds even if the backend ignores the limit that it was sent. The limit is exceeded when `room` is below 0.
    `guessed` means that the tokens were made from text, so that their number is only an estimate.
    """

    # Token ids are counted on arrival. Tokens made from text are cut where the network cut the text, so there are more
    # of them than the model generated. If there are too many, the whole text is encoded again and counted. This is rare
    # enough that the work stays linear.

    def __init__(self, encoding: Encoding, max_tokens: int, *, guessed: bool) -> None:
        self._encoding = encoding
        self._max_tokens = max_tokens
        self._is_guessed = guessed
        self._seen: list[int] = []  # all tokens, if they are guessed
        # Tokens that may still arrive before the limit is exceeded; for guessed tokens, before the next check of it.
        self.room = max_tokens

    def within_limit(self, tokens: Sequence[int]) -> Sequence[int]:
        """Count the tokens that arrived, and return those within the limit.

        Guessed tokens are all returned, also when they exceed the limit.
        """
        self.room -= len(tokens)
        if not self._is_guessed:
            return tokens if self.room >= 0 else tokens[: self.room]
        self._seen.extend(tokens)
        if self.room < 0:
            # The guessed count has to grow by the remaining budget before the limit can be exceeded.
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
