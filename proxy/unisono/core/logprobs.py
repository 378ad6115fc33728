"""Log probabilities of the tokens that a backend generated, and of the visible text.

The gateway may repair, hold or cut text before it is emitted. Emitted text is therefore matched to the generated tokens
by their bytes. Text of the gateway's own has no log probabilities. The text of a raw completion is not changed, so its
tokens are read by position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from unisono.core.generation import FIRST_SPECIAL, MESSAGE, TokenLogprob

# Bytes of text without tokens after which the rest of a text has no log probabilities.
MAX_OWN_BYTES: Final = 4_096


# Token with its log probability, None if it is unknown.
ScoredToken: TypeAlias = tuple[int, TokenLogprob | None]


@dataclass(slots=True)
class _Text:
    """Position in the generated tokens of a text that is emitted; None if it is lost."""

    position: int | None = None
    # Bytes that were emitted after the last matched token.
    rest: bytes = b""


class LogprobLog:
    """Generated tokens of one answer, with their log probabilities.

    `token_bytes` spells a token. `prompt` holds the tokens of a prompt whose log probabilities were requested, once
    they have arrived.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self.token_bytes = token_bytes
        self.prompt: Sequence[ScoredToken] = ()
        self._tokens: list[int] = []
        self._values: list[TokenLogprob | None] = []
        # Positions at which the body of a message may begin.
        self._begins: list[int] = []
        self._texts: dict[int, _Text] = {}

    def start_generation(self) -> None:
        """Note that a prompt may end inside of a message, whose body continues with the next token."""
        self._begins.append(len(self._tokens))

    def add(self, tokens: Sequence[int], values: Sequence[TokenLogprob | None]) -> None:
        """Add tokens that a backend generated. Missing values count as unknown."""
        for position, token in enumerate(tokens):
            self._tokens.append(token)
            self._values.append(values[position] if position < len(values) else None)
            if token == MESSAGE:
                self._begins.append(len(self._tokens))

    def scored(self, begin: int, end: int) -> list[ScoredToken]:
        """Return the generated tokens at these positions."""
        return list(zip(self._tokens[begin:end], self._values[begin:end], strict=True))

    def truncate(self, size: int) -> None:
        """Forget all generated tokens after the first `size`, which are generated again."""
        del self._tokens[size:], self._values[size:]
        self._begins = [begin for begin in self._begins if begin <= size]

    def emitted(self, item: int, text: str) -> list[tuple[bytes, TokenLogprob]]:
        """Return the tokens that `text` completes, in order.

        `text` is the next part of the item with the index `item`.
        """
        content = text.encode("utf-8", "surrogatepass")
        state = self._texts.get(item)
        if state is None:
            state = self._texts[item] = _Text(self._begin_of(content))
        if state.position is None:
            return []
        content = state.rest + content
        found: list[tuple[bytes, TokenLogprob]] = []
        # A text may be the whole of a long answer, so matched bytes are skipped instead of cut off.
        at, start = state.position, 0
        while start < len(content) and at < len(self._tokens):
            token = self._tokens[at]
            spelled = self.token_bytes(token)
            if token >= FIRST_SPECIAL:
                # The text goes on in another message, or after an edit of the gateway.
                if at + 1 >= len(self._tokens):
                    break
                at += 1
                continue
            if content.startswith(spelled, start):
                if (value := self._values[at]) is not None:
                    found.append((spelled, value))
                start += len(spelled)
                at += 1
            elif len(content) - start < len(spelled) and spelled.startswith(content[start:]):
                break
            elif (inserted := content.find(spelled, start)) >= 0:
                # The gateway inserted text before this token.
                start = inserted
            else:
                break
        # Text without tokens is of the gateway's own, and may be followed by generated text.
        state.rest = content[start:]
        state.position = at if len(state.rest) <= MAX_OWN_BYTES else None
        return found

    def _begin_of(self, content: bytes) -> int | None:
        """Return the position whose tokens agree longest with the beginning of a text.

        Of several, it is the last; None if none agrees.
        """
        best, longest = None, 0
        for begin in self._begins:
            common = self._agreement(begin, content)
            if common and common >= longest:
                best, longest = begin, common
        return best

    def _agreement(self, begin: int, content: bytes) -> int:
        """Return the length of the beginning of a text that the tokens from a position on spell."""
        start = 0
        for at in range(begin, len(self._tokens)):
            token = self._tokens[at]
            if start == len(content) or token >= FIRST_SPECIAL:
                break
            spelled = self.token_bytes(token)
            if not content.startswith(spelled, start):
                return start + _common_length(spelled, content[start : start + len(spelled)])
            start += len(spelled)
        return start


def _common_length(one: bytes, other: bytes) -> int:
    """Return the length of the longest common beginning."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
