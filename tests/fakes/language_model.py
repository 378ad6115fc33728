"""Deterministic language model behind a fake vLLM, with faults, for comparisons of backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import log
from typing import Any

from unisono.core.generation import CHANNEL, END, MESSAGE, RETURN, START

from .dialects import VllmScript

ASSISTANT, ANALYSIS, FINAL = 173781, 35644, 17196
REASONING_TOKENS, FINAL_TOKENS = 8, 16
HEADER = [CHANNEL, ANALYSIS, MESSAGE]
BETWEEN = [END, START, ASSISTANT, CHANNEL, FINAL, MESSAGE]
ANSWER_TOKENS = len(HEADER) + REASONING_TOKENS + len(BETWEEN) + FINAL_TOKENS + 1
ALTERNATIVES = 12

Distribution = dict[int, float]
# Changes the distribution at a position of an answer to a prompt.
Fault = Callable[[Sequence[int], int, Distribution], Distribution]


def healthy(prompt: Sequence[int], position: int, distribution: Distribution) -> Distribution:
    return distribution


@dataclass(frozen=True)
class LanguageModel:
    """Model whose distributions depend on the prompt and the position in the answer only."""

    fault: Fault = healthy

    def distribution(self, prompt: Sequence[int], position: int) -> Distribution:
        """Return the log probabilities of the most likely tokens."""
        return self.fault(prompt, position, dict(_healthy_distribution(tuple(prompt), position)))

    def greedy(self, prompt: Sequence[int], tokens: int = 10**6) -> list[int]:
        return [_best(self.distribution(prompt, at)) for at in range(min(tokens, ANSWER_TOKENS))]

    def script(self, asked: Mapping[str, Any]) -> VllmScript:
        """Return the script of vLLM for a request. The prompt ends with the first role of an assistant."""
        tokens = list(asked["prompt"])
        size = tokens.index(ASSISTANT, 1) + 1
        prompt, given = tokens[:size], tokens[size:]
        answer = self.greedy(prompt)[len(given) :]
        if not asked.get("echo"):
            return VllmScript(tokens=answer, per_chunk=8)
        rows = [self.distribution(prompt, at) for at in range(len(given))]
        echo = {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": [None, *[-1.0] * (size - 1), *map(_logprob, rows, given)],
            "top_logprobs": [
                None,
                *({f"token_id:{token}": -1.0} for token in prompt[1:]),
                *({f"token_id:{token}": value for token, value in _top(row, asked["logprobs"])} for row in rows),
            ],
        }
        return VllmScript(tokens=answer[:1] or [RETURN], echo=echo)


# Cached, because the tests compare models with different faults on the same prompts.
@lru_cache(maxsize=10_000)
def _healthy_distribution(prompt: tuple[int, ...], position: int) -> Distribution:
    form = HEADER + [0] * REASONING_TOKENS + BETWEEN + [0] * FINAL_TOKENS + [RETURN]
    fixed = form[position] if position < len(form) else RETURN
    digest = blake2b(repr((list(prompt), position)).encode(), digest_size=2 * ALTERNATIVES).digest()
    words = [int.from_bytes(digest[at : at + 2]) for at in range(0, len(digest), 2)]
    best = 0.999 if fixed else 0.4 + words[0] % 500 / 1000
    tokens = [fixed or 1000 + words[0], *(1000 + word for word in words[1:])]
    rest = (1 - best) / 2
    shares = [best, *(rest / 2**at for at in range(1, ALTERNATIVES))]
    return {token: log(share) for token, share in zip(tokens, shares, strict=True)}


def _top(row: Distribution, count: int) -> list[tuple[int, float]]:
    return sorted(row.items(), key=lambda one: -one[1])[:count]


def _best(row: Distribution) -> int:
    return max(row, key=lambda token: row[token])


def _logprob(row: Distribution, token: int) -> float:
    return row.get(token, -20.0)
