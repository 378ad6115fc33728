"""Answers that continuous fidelity scores.

The tokens of an answer count for the measure `implausible` only if the model alone decided on them.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.frozen import dataclass
from unisono.core.generation import Sampling
from unisono.core.observer import TokenInfluences


@dataclass(frozen=True, slots=True)
class LiveSample:
    """Answer of a deployment.

    `is_free` means that only the model decided on the tokens, without constraints or penalties. `tokens` is empty for a
    prompt that the shadow has yet to answer.
    """

    deployment: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    is_free: bool


def model_decides_alone(influences: TokenInfluences) -> bool:
    """Return True if only the model decides on the tokens, without any constraint or penalty."""
    is_forced = influences.has_form or influences.has_tool_choice or influences.has_reasoning_budget
    if is_forced or influences.is_raw_prompt or influences.has_strict_tools:
        return False
    return not (influences.sampling.temperature > 1 or _has_penalty(influences.sampling))


def _has_penalty(sampling: Sampling) -> bool:
    """Return True if penalties or biases change the probabilities of the model."""
    has_penalty = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
    return bool(has_penalty or sampling.logit_bias)
