"""Sampling settings of one request in a shared batch; other requests are not affected.

Importing this module imports mlx, so only the engine process imports it. All settings are checked before a request
joins the batch, because an exception during a step would fail every request in the batch.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from unisono.core.generation import SEEDS, VOCABULARY, Sampling

# mlx has no types; arrays are only passed between mlx functions.
Sampler: TypeAlias = Callable[[mx.array], mx.array]
Processor: TypeAlias = Callable[[mx.array, mx.array], mx.array]

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("top_k", -1, math.inf),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
    ("repetition_penalty", 0.01, 100.0),
)
# Below this temperature the most probable token is always chosen, and dividing by the temperature would overflow.
_COLDEST = 1e-3

# With top_p 0, mlx_lm would exclude every token. This minimum keeps the most probable token.
_SMALLEST_TOP_P = 1e-6


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError, with the name of the field, if a setting is out of range."""
    for name, low, high in _RANGES:
        value = getattr(sampling, name)
        if not low <= value <= high:  # false for NaN too
            raise ValueError(f"{name} must be between {low} and {high}, not {value}")
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < VOCABULARY:
            raise ValueError(f"logit_bias: token {token} is not in the vocabulary")
        if not math.isfinite(bias):
            raise ValueError(f"logit_bias: {bias} for token {token} is not a finite number")


def make_sampler(sampling: Sampling) -> Sampler | None:
    """Return a sampler, or None for greedy decoding.

    The batch decodes all greedy requests in one call. The order is temperature, top_k, top_p, min_p, as in vLLM, so
    that the same settings have the same effect. Each request has its own random key. So a seed gives the same tokens,
    whichever other requests are in the batch.
    """
    if sampling.temperature < _COLDEST:
        return None
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed % SEEDS
    key = mx.random.key(seed)

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal key
        key, once = mx.random.split(key)
        scaled = logprobs.astype(mx.float32) * (1.0 / sampling.temperature)
        if 0 < sampling.top_k < VOCABULARY:
            scaled = apply_top_k(scaled, sampling.top_k)
        scaled = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
        if sampling.top_p < 1.0:
            scaled = apply_top_p(scaled, max(sampling.top_p, _SMALLEST_TOP_P))
        if sampling.min_p > 0.0:
            scaled = apply_min_p(scaled, sampling.min_p)
        return mx.random.categorical(scaled, key=once)

    return sample


def make_processors(sampling: Sampling, prompt_length: int) -> list[Processor]:
    """Return the processors that apply biases and penalties, in the same order as vLLM.

    A processor gets all ids of the request so far, including those of the prompt, and a row of logits. `prompt_length`
    is in tokens. The presence and frequency penalties apply to generated tokens, as OpenAI defines them. The repetition
    penalty also applies to the tokens of the prompt.
    """
    processors: list[Processor] = []
    if sampling.logit_bias:
        biased = mx.array(list(sampling.logit_bias))
        amounts = mx.array(list(sampling.logit_bias.values()))
        processors.append(lambda _, logits: logits.at[:, biased].add(amounts.astype(logits.dtype)))
    if sampling.repetition_penalty != 1.0:
        processors.append(_repetition(sampling.repetition_penalty))
    if sampling.frequency_penalty or sampling.presence_penalty:
        processors.append(_occurrence(sampling.frequency_penalty, sampling.presence_penalty, prompt_length))
    return processors


def _repetition(penalty: float) -> Processor:
    def discourage(tokens: mx.array, logits: mx.array) -> mx.array:
        seen = logits[:, tokens]
        logits[:, tokens] = mx.where(seen < 0, seen * penalty, seen / penalty)
        return logits

    return discourage


def _occurrence(frequency: float, presence: float, prompt_length: int) -> Processor:
    def discourage(tokens: mx.array, logits: mx.array) -> mx.array:
        generated = tokens[prompt_length:]
        if generated.size == 0:
            return logits
        if frequency:
            logits = logits.at[:, generated].subtract(mx.array(frequency, logits.dtype))
        if presence:
            logits[:, generated] = logits[:, generated] - presence
        return logits

    return discourage
