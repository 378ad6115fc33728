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


def to_sampling(fields: SamplingFields) -> Sampling:
    """Return all sampling values. Absent fields have the model's recommended values."""
    values = {
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": None if fields.top_k is None else max(0, fields.top_k),
        "min_p": fields.min_p,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "repetition_penalty": fields.repetition_penalty,
        "seed": fields.seed,
        "logit_bias": fields.logit_bias,
    }
    return Sampling(**{name: value for name, value in values.items() if value is not None})  # type: ignore[arg-type]
