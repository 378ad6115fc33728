"""Limits on the tokens of one answer: reasoning budget and endless repetition. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from unisono.core.generation import FIRST_SPECIAL
from unisono.engine.interventions.requirements import Obligations, OutputRequirements
from unisono.harmony.encoding import Encoding
from unisono.harmony.raw_codec import MAX_CHARACTER_TOKENS, unfinished
from unisono.harmony.router import HarmonyRouter

# A model that repeats the same tokens never stops by itself. Only a long, exact repetition without a gap counts:
# tables of equal rows, lists of zeros and padded data are valid answers. For reasoning, which is not read as data, a
# shorter one is enough. The check is cheap. It runs every `CHECK_INTERVAL_TOKENS` tokens, usually ends at the first
# few tokens, and never reads them all more than once.

CHECK_INTERVAL_TOKENS: Final = 256  # tokens between two checks
MAX_PERIOD_TOKENS: Final = 64  # longest period in tokens
REPEAT_TOKENS: Final = 4096  # tokens that must repeat those one period earlier: at least 65 occurrences
REASONING_REPEAT_TOKENS: Final = 512
_UNLIMITED: Final = 1 << 62


class ReadingLimits:
    """Positions between two tokens at which reading stops, so that the controller can decide.

    `read` is the number of journal entries since the last note or step.
    """

    # Rules.
    # - Reasoning ends before the first token that the budget has no room for, but not inside a character.
    # - A marker ends reasoning by itself: a budget equal to its length is not exceeded.
    # - Repetition is checked at fixed positions of the journal, so that a replay stops at the same token.

    def __init__(
        self, encoding: Encoding, router: HarmonyRouter, requirements: OutputRequirements, obligations: Obligations
    ) -> None:
        self._encoding = encoding
        self._router = router
        self._obligations = obligations
        self.budget = requirements.budget  # limit of reasoning tokens
        self._detects_repetition = requirements.detects_repetition
        if self.budget is not None and self.budget < 1:
            obligations.is_late = True

    def until_check(self, read: int) -> int:
        """Return the number of tokens before the next check for repetition."""
        return CHECK_INTERVAL_TOKENS - read % CHECK_INTERVAL_TOKENS if self._detects_repetition else _UNLIMITED

    def are_in_budget(self, tokens: Sequence[int]) -> bool:
        """Return whether the budget has room for all `tokens`, and none of them is a marker."""
        assert self.budget is not None
        if self._obligations.is_late:
            return True
        room = self.budget - self._router.counter.reasoning
        return len(tokens) <= room and max(tokens, default=0) < FIRST_SPECIAL

    def portion(self, tokens: Sequence[int], read: int) -> int:
        """Return the number of `tokens` that may be read before the next check."""
        size = min(len(tokens), self.until_check(read))
        if self.budget is not None and not self._obligations.is_late:
            # The router may hold back part of a header. A marker may show that these tokens were reasoning, and more
            # reasoning may follow.
            size = next((at for at, token in enumerate(tokens[:size], 1) if token >= FIRST_SPECIAL), size)
            if self._router.is_reasoning is not False:
                size = min(size, max(self.budget - self._router.counter.reasoning, 1))
        return size

    def has_room_for(self, token: int, tokens_read: Callable[[], Sequence[int]]) -> bool:
        """Return whether `token` fits into the reasoning budget, or no budget applies.

        `tokens_read` returns the tokens since the last note or step.
        """
        if self.budget is None or self._obligations.is_late:
            return True
        used, is_reasoning = self._router.counter.reasoning, self._router.is_reasoning
        if used < self.budget:
            return True
        # The rest of a character that bytes were read of may exceed the budget. Bytes that never make a character must
        # not: hence the limit.
        is_cut = used < self.budget + MAX_CHARACTER_TOKENS and unfinished(self._encoding, tokens_read())
        return bool(is_cut or (is_reasoning and token >= FIRST_SPECIAL))

    def is_repeating(self, journal: Sequence[int], read: int) -> bool:
        """Return whether the end of `journal` is a repetition; call it after each portion."""
        if not self._detects_repetition or read % CHECK_INTERVAL_TOKENS:
            return False
        length = REASONING_REPEAT_TOKENS if self._router.is_reasoning else REPEAT_TOKENS
        return repeats(journal, len(journal) - read, length)


def repeats(tokens: Sequence[int], begin: int, length: int = REPEAT_TOKENS) -> bool:
    """Return whether the generation from `begin` ends in a repetition of `length` tokens.

    `length` must be a multiple of the longest period.
    """
    size = len(tokens)
    if size - begin <= length:
        return False
    last = tokens[-1]
    before = tokens[-1 - MAX_PERIOD_TOKENS : -1]
    # Usually the last token does not occur among the tokens just before it.
    if last not in before:
        return False
    few = tokens[-MAX_PERIOD_TOKENS:]
    for period in range(1, MAX_PERIOD_TOKENS + 1):
        if before[-period] == last and tokens[size - MAX_PERIOD_TOKENS - period : size - period] == few:
            # If a longer period held over the whole length, the shortest one that holds for these few tokens would hold
            # too.
            return size - begin >= length + period and tokens[-length:] == tokens[-length - period : -period]
    return False
