"""How the next token is drawn, from the fields every surface has in common."""

from __future__ import annotations

from typing import Protocol

from unisono.core.generation import Sampling


class Asked(Protocol):
    """A request's sampling fields; None is what the client left out."""

    @property
    def temperature(self) -> float | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def presence_penalty(self) -> float | None: ...
    @property
    def frequency_penalty(self) -> float | None: ...
    @property
    def repetition_penalty(self) -> float | None: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def logit_bias(self) -> dict[int, float] | None: ...


def to_sampling(asked: Asked) -> Sampling:
    """Every field explicitly; what the client left out has the model's recommended value."""
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
