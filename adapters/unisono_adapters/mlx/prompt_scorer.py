"""Log probabilities of the tokens of a prompt, computed while the model reads the prompt.

Importing this module imports mlx, so only the engine process imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from unisono_adapters.mlx.prefix import Layers
from unisono_adapters.mlx.wire import Logprob

# Maximum number of tokens per pass of the model. The result has 201,088 numbers for each token: 100 MB per pass.
SCORED_TOKENS: Final = 128


class PromptScorer:
    """Scorer of one prompt, in parts of at most `SCORED_TOKENS` tokens.

    `top` is the number of alternatives to return for each token. When the scorer is done, the attention caches in
    `layers` cover the whole prompt except its last token.
    """

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
        """Score the next part of the prompt.

        The first part begins with the second token of the prompt.
        """
        begin, end = self._done, min(self._done + SCORED_TOKENS, len(self._prompt) - 1)
        rows = self._model(mx.array([self._prompt[begin:end]]), cache=self.layers)[0]
        self._done = end
        following = self._prompt[begin + 1 : end + 1]
        scored = [logprob_of(row, token, self._top) for row, token in zip(rows, following, strict=True)]
        mx.eval([layer.state for layer in self.layers])  # otherwise the lazy state would keep `rows` in memory
        return scored


def logprob_of(values: mx.array, token: int, top: int) -> Logprob:
    """Return the log probability of `token`, and the `top` most likely alternatives.

    `values` is a row of logits: one number for each token of the vocabulary.
    """
    values = values.astype(mx.float32)
    # Normalise again, because biases and penalties may have changed the sum of the probabilities.
    values = values - mx.logsumexp(values)
    own = cast("float", values[token].item())
    if not top:
        return own, []
    ids = cast("list[int]", mx.argpartition(-values, kth=top - 1)[:top].tolist())
    ranked = [(each, cast("float", values[each].item())) for each in ids]
    return own, sorted(ranked, key=lambda one: -one[1])
