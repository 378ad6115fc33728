"""Log probabilities of a prompt's tokens, from the pass of the model that fills the cache.

Importing this module imports mlx, so only the engine process does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from unisono_adapters.mlx.prefix import Layers
from unisono_adapters.mlx.wire import Logprob

# Tokens of one pass. Its result has a row of 201,088 numbers for each of them, 100 MB in all.
SCORED_TOKENS: Final = 128


class PromptScorer:
    """Scores one prompt part by part. `layers` then hold all of it but the last token."""

    def __init__(self, model: object, prompt: Sequence[int], top: int) -> None:
        self._model = cast("Callable[..., mx.array]", model)
        self._prompt = list(prompt)
        self._top = top
        self._done = 0
        self.layers: Layers = make_prompt_cache(model)

    @property
    def is_done(self) -> bool:
        return self._done == len(self._prompt) - 1

    def next_part(self) -> list[Logprob]:
        """Return the log probabilities of the next tokens, from the second one of the prompt on."""
        begin, end = self._done, min(self._done + SCORED_TOKENS, len(self._prompt) - 1)
        rows = self._model(mx.array([self._prompt[begin:end]]), cache=self.layers)[0]
        self._done = end
        following = self._prompt[begin + 1 : end + 1]
        scored = [logprob_of(row, token, self._top) for row, token in zip(rows, following, strict=True)]
        mx.eval([layer.state for layer in self.layers])  # otherwise it would keep a reference to the rows
        return scored


def logprob_of(values: mx.array, token: int, top: int) -> Logprob:
    """Return the log probability of a token, and those of the `top` most likely ones.

    `values` is a row of logits.
    """
    values = values.astype(mx.float32)
    # The sum of the probabilities is 1 also after biases and penalties.
    values = values - mx.logsumexp(values)
    own = cast("float", values[token].item())
    if not top:
        return own, []
    ids = cast("list[int]", mx.argpartition(-values, kth=top - 1)[:top].tolist())
    ranked = [(each, cast("float", values[each].item())) for each in ids]
    return own, sorted(ranked, key=lambda one: -one[1])
