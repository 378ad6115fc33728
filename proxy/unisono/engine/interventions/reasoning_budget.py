"""Limits on the tokens of one answer: reasoning budget and endless repetition. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from unisono.core.generation import FIRST_SPECIAL
from unisono.engine.interventions.requirements import Obligations, OutputRequirements
from unisono.harmony.channel_router import HarmonyRouter
from unisono.harmony.encoding import Encoding
from unisono.harmony.raw_codec import MAX_CHARACTER_TOKENS, unfinished
from unisono.harmony.repetition import CHECK_INTERVAL_TOKENS, REASONING_REPEAT_TOKENS, REPEAT_TOKENS, repeats

_UNLIMITED: Final = 1 << 62


class ReadingLimits:
    """Limits at which reading stops between two tokens, so that the controller can decide.

    The parameter `read` of the methods is the number of journal numbers after the last note or `STEP_ENDED` mark.
    """

    # Rules.
    # - Reasoning ends before the first token that exceeds the budget, but not inside a character.
    # - A control token ends reasoning by itself, so reasoning that is exactly as long as the budget is not cut.
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
        """Return whether the budget has room for all `tokens`, and no token is a control token.

        Returns True if the budget was used up before, because it then has no further effect on reading.
        """
        assert self.budget is not None
        if self._obligations.is_late:
            return True
        room = self.budget - self._router.counter.reasoning
        return len(tokens) <= room and max(tokens, default=0) < FIRST_SPECIAL

    def portion(self, tokens: Sequence[int], read: int) -> int:
        """Return how many of `tokens` may be read before budget or repetition must be checked."""
        size = min(len(tokens), self.until_check(read))
        if self.budget is not None and not self._obligations.is_late:
            # The router may hold back tokens that could be part of a header. The next control token may show that these
            # tokens were reasoning, so stop after that control token.
            size = next((at for at, token in enumerate(tokens[:size], 1) if token >= FIRST_SPECIAL), size)
            if self._router.is_reasoning is not False:
                size = min(size, max(self.budget - self._router.counter.reasoning, 1))
        return size

    def has_room_for(self, token: int, tokens_read: Callable[[], Sequence[int]]) -> bool:
        """Return whether `token` fits into the reasoning budget, or no budget applies.

        `tokens_read` returns the tokens after the last note or `STEP_ENDED` mark of the journal.
        """
        if self.budget is None or self._obligations.is_late:
            return True
        used, is_reasoning = self._router.counter.reasoning, self._router.is_reasoning
        if used < self.budget:
            return True
        # If the tokens end inside a character, the rest of this character may exceed the budget. The excess is limited,
        # because a model may generate bytes that never form a character.
        is_cut = used < self.budget + MAX_CHARACTER_TOKENS and unfinished(self._encoding, tokens_read())
        return bool(is_cut or (is_reasoning and token >= FIRST_SPECIAL))

    def is_repeating(self, journal: Sequence[int], read: int) -> bool:
        """Return whether `journal` ends with a repetition; call this after each portion."""
        if not self._detects_repetition or read % CHECK_INTERVAL_TOKENS:
            return False
        length = REASONING_REPEAT_TOKENS if self._router.is_reasoning else REPEAT_TOKENS
        return repeats(journal, len(journal) - read, length)
