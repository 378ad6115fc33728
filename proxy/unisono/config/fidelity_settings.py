"""Section of continuous fidelity."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from unisono.config.section import Count, Name, Section

Share = Annotated[float, Field(ge=0, le=1)]


class FidelityThresholds(Section):
    """Limits of what rounding explains."""

    agreement: Share = 0.995
    """Least share of tokens where both backends prefer the same one."""
    divergence: Annotated[float, Field(gt=0)] = 0.002
    """Greatest mean divergence of the distributions, in nats."""
    implausible: Share = 0.0003
    """Greatest share of tokens that the reference considers practically impossible.
    Their probability is below one in a million."""


class FidelitySettings(Section):
    """Comparison of live answers with a reference, for one model."""

    reference: Name
    """Backend of the same `model_name` that scores the answers of the others.
    It must be able to score."""
    sample: Share = 0.01
    """Share of the answers that are scored.
    Backends with a warning are scored more often."""
    budget: Count = 200_000
    """Maximum tokens per hour, prompts included, that are scored.
    Tokens that two backends score count twice. Each worker has the whole budget."""
    thresholds: FidelityThresholds = Field(default_factory=FidelityThresholds)
    """Limits beyond which a backend gets a warning."""
    quarantine_s: Annotated[float, Field(ge=0)] = 900.0
    """Time of the first quarantine, in seconds; it doubles each time.
    With 0, there are only warnings."""
