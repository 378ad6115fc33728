"""Limits on the tokens of one answer: reasoning budget and endless repetition. No I/O.

A model that repeats the same tokens never stops by itself. Only a long, exact repetition without a gap counts: tables
of equal rows, lists of zeros and padded data are valid answers. For reasoning, which is not read as data, a shorter one
is enough. The check is cheap. It runs every `CHECK_INTERVAL_TOKENS` tokens, usually ends at the first few tokens, and
never reads them all more than once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from unisono.core.generation import FIRST_SPECIAL
from unisono.engine.interventions.controller import BUDGET, REPETITION, InterventionController
from unisono.engine.journal import JournalWriter
from unisono.harmony.encoding import Encoding
from unisono.harmony.router import HarmonyRouter
from unisono.harmony.utf8_tail import MAX_CHARACTER_TOKENS, unfinished

CHECK_INTERVAL_TOKENS: Final = 256  # tokens between two checks
MAX_PERIOD_TOKENS: Final = 64  # longest period in tokens
REPEAT_TOKENS: Final = 4096  # tokens that must repeat those one period earlier: at least 65 occurrences
REASONING_REPEAT_TOKENS: Final = 512
_UNLIMITED: Final = 1 << 62


class ReadingLimits:
    """Limits at which reading stops between two tokens, so that the controller can decide.

    `is_broken_off` is set when the answer ends here, because the model repeats itself.
    """

    # Rules.
    # - Reasoning ends before the first token that the budget has no room for, but not inside a character.
    # - A marker ends reasoning by itself: a budget equal to its length is not exceeded.
    # - Repetition is checked at fixed positions of the journal, so that a replay stops at the same token.
    # - Reasoning that repeats itself is ended once; an answer that repeats itself is broken off.

    def __init__(
        self, encoding: Encoding, router: HarmonyRouter, controller: InterventionController, journal: JournalWriter
    ) -> None:
        self._encoding = encoding
        self._router = router
        self._controller = controller
        self._journal = journal
        self._budget = controller.requirements.budget  # limit of reasoning tokens
        self._detects_repetition = REPETITION not in controller.requirements.unmended
        self.is_broken_off = False
        if self._budget is not None and self._budget < 1:
            controller.obligations.is_late = True

    @property
    def _has_budget(self) -> bool:
        return self._budget is not None and not self._controller.obligations.is_late

    def unchecked_tokens(self) -> int:
        """Return the number of following tokens during which only the router can stop the stream."""
        if self._controller.is_naming or self._has_budget:
            return 0
        return self._tokens_to_check if self._detects_repetition else _UNLIMITED

    @property
    def _tokens_to_check(self) -> int:
        journal = self._journal
        return CHECK_INTERVAL_TOKENS - (len(journal.numbers) - journal.segment_start) % CHECK_INTERVAL_TOKENS

    def portion(self, tokens: Sequence[int]) -> int:
        """Return the number of `tokens` that may be read before the next check."""
        size = len(tokens)
        if self._controller.is_naming:
            return size
        if self._detects_repetition:
            size = min(size, self._tokens_to_check)
        if self._budget is not None and self._has_budget:
            # The router may hold back part of a header. A marker may show that these tokens were reasoning, and more
            # reasoning may follow.
            size = next((at for at, token in enumerate(tokens[:size], 1) if token >= FIRST_SPECIAL), size)
            if self._router.is_reasoning is not False:
                size = min(size, max(self._budget - self._router.usage.reasoning_tokens, 1))
        return size

    def ends_reasoning(self, token: int) -> bool:
        """End reasoning before `token` if the budget has no room for it; return whether it ended."""
        used, is_reasoning = self._router.usage.reasoning_tokens, self._router.is_reasoning
        if self._budget is None or not self._has_budget or used < self._budget:
            return False
        is_cut = used < self._budget + MAX_CHARACTER_TOKENS and unfinished(self._encoding, self._journal.new_tokens)
        if is_cut or (is_reasoning and token >= FIRST_SPECIAL):
            return False
        if is_reasoning:
            self._controller.end_reasoning(self._journal.tail_length, rule=BUDGET)
        else:
            self._controller.obligations.is_late = True
        return is_reasoning is True

    def check_repetition(self) -> None:
        """Stop the stream if the model repeats itself; call it after each portion."""
        if not self._detects_repetition or self._tokens_to_check != CHECK_INTERVAL_TOKENS:
            return
        is_reasoning = self._router.is_reasoning
        length = REASONING_REPEAT_TOKENS if is_reasoning else REPEAT_TOKENS
        if not repeats(self._journal.numbers, self._journal.segment_start, length):
            return
        if is_reasoning and not self._controller.is_spent:
            self._controller.end_reasoning(self._journal.tail_length, rule=REPETITION)
        else:
            self.is_broken_off = True


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
