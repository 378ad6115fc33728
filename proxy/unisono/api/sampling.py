"""Sampling fields common to all API surfaces, and their conversion."""

from __future__ import annotations

from unisono.api.field_types import (
    LogitBias,
    MinP,
    OpenModel,
    Penalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from unisono.core.generation import Sampling


class SamplingFields(OpenModel):
    """Sampling fields of a request; null or absent means the default."""

    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None


def to_sampling(asked: SamplingFields) -> Sampling:
    """Return all sampling values. Absent fields have the model's recommended values."""
    given = {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": None if asked.top_k is None else max(0, asked.top_k),
        "min_p": asked.min_p,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repetition_penalty": asked.repetition_penalty,
        "seed": asked.seed,
        "logit_bias": asked.logit_bias,
    }
    return Sampling(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
