"""How much of a generation is taken: no more than was asked for, whatever the backend does with the limit it was sent.

Ids are counted as they come. Tokens that were made from text are cut where the network cut it, which makes more of them
than the model generated; when there are too many, the whole text is counted once more as the tokenizer makes it. That
is done so seldom that the work stays linear. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.generation import FIRST_SPECIAL
from unisono.harmony.encoding import Encoding


class TokenCap:
    """For one generation of at most so many tokens. `passed` says whether it went on behind them."""

    def __init__(self, encoding: Encoding, most: int, *, guessed: bool) -> None:
        self._encoding = encoding
        self._most = most
        self._guessed = guessed
        self._seen: list[int] = []
        self._count = 0
        self._next = most
        self.passed = False

    def taken(self, tokens: Sequence[int]) -> Sequence[int]:
        """Those of some more tokens that count; where they are guesses, all that came with the last of them."""
        self._count += len(tokens)
        if not self._guessed:
            self.passed = self._count > self._most
            return tokens[: len(tokens) - (self._count - self._most)] if self.passed else tokens
        self._seen += tokens
        if self._count > self._next:
            made = self._made()
            self.passed = made > self._most
            # So many more have to come before there can be too many.
            self._next = self._count + self._most - made
        return tokens

    def counts_anew(self, tokens: Sequence[int]) -> int:
        """Number of tokens whose text `taken` encodes again for some more tokens."""
        is_due = self._guessed and self._count + len(tokens) > self._next
        return len(self._seen) + len(tokens) if is_due else 0

    def _made(self) -> int:
        ordinary = [token for token in self._seen if token < FIRST_SPECIAL]
        return len(self._seen) - len(ordinary) + len(self._encoding.encode_generated(self._encoding.decode(ordinary)))
