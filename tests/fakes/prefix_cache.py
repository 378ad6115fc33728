"""Prefix cache of vLLM: cached tokens are counted in whole blocks, from the beginning of the prompt."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK_TOKENS = 16


class PrefixCache:
    """Index of the blocks that earlier requests computed; it never forgets one. Salts separate requests."""

    def __init__(self) -> None:
        self._blocks: set[tuple[object, ...]] = set()

    def record(self, salt: object, prompt: Sequence[object], generated: Sequence[object]) -> int:
        """Record a request and return the number of its prompt tokens that were cached before."""
        # The last token of a prompt is always computed, and the last generated token never is.
        cached = 0
        for end in _block_ends(prompt[:-1]):
            if (salt, *prompt[:end]) not in self._blocks:
                break
            cached = end
        computed = [*prompt, *generated[:-1]]
        self._blocks |= {(salt, *computed[:end]) for end in _block_ends(computed)}
        return cached


def _block_ends(tokens: Sequence[object]) -> range:
    return range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
