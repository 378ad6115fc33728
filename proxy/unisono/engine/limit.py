"""Token limit of a generation, enforced even if the backend ignores the limit it was sent.

Token ids are counted on arrival. Tokens made from text are cut where the network cut the text, so there are more of
them than the model generated. If there are too many, the whole text is encoded again and counted. This is rare enough
that the work stays linear. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.generation import FIRST_SPECIAL
from unisono.harmony.encoding import Encoding


class TokenCap:
    """Limit of one generation to `most` tokens.

    `passed` is set when the generation exceeded it.
    """

    def __init__(self, encoding: Encoding, most: int, *, guessed: bool) -> None:
        self._encoding = encoding
        self._most = most
        self._guessed = guessed
        self._seen: list[int] = []
        self._count = 0
        self._next = most
        self.passed = False

    def taken(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens that count.

        For guessed tokens, these are all that arrived with the last counted one.
        """
        self._count += len(tokens)
        if not self._guessed:
            self.passed = self._count > self._most
            return tokens[: len(tokens) - (self._count - self._most)] if self.passed else tokens
        self._seen += tokens
        if self._count > self._next:
            made = self._made()
            self.passed = made > self._most
            # The guessed count has to grow by the remaining budget before the limit can be exceeded.
            self._next = self._count + self._most - made
        return tokens

    def counts_anew(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens whose text `taken` encodes again for some more tokens."""
        is_due = self._guessed and self._count + len(tokens) > self._next
        return len(self._seen) + len(tokens) if is_due else 0

    def _made(self) -> int:
        ordinary = [token for token in self._seen if token < FIRST_SPECIAL]
        return len(self._seen) - len(ordinary) + len(self._encoding.encode_generated(self._encoding.decode(ordinary)))
