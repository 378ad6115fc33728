"""Section `fidelity`: continuous comparison of backends with a reference backend."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from unisono.config.section_base import Count, Name, Section

Share = Annotated[float, Field(ge=0, le=1)]


class FidelityThresholds(Section):
    """Limits for differences that rounding can explain."""

    agreement: Share = 0.995
    """Minimum share of positions at which both backends consider the same token the most likely."""
    divergence: Annotated[float, Field(gt=0)] = 0.002
    """Maximum mean divergence of the probability distributions, in nats."""
    implausible: Share = 0.0003
    """Maximum share of generated tokens that the reference considers practically impossible.
    A token is practically impossible if its probability is below one in a million."""


class FidelitySettings(Section):
    """Comparison of live answers with a reference backend, for one model."""

    reference: Name
    """Reference backend of the same `model_name`, which scores answers of the other backends.
    It must support scoring."""
    sample: Share = 0.01
    """Share of the answers that are scored, from 0 to 1.
    Answers of backends with a warning are scored more often."""
    budget: Count = 200_000
    """Maximum number of tokens to score per hour, including the tokens of prompts.
    A token that two backends score is counted twice. Each worker has the whole budget."""
    thresholds: FidelityThresholds = Field(default_factory=FidelityThresholds)
    """Limits for the differences. A backend that violates one of these limits gets a warning."""
    quarantine_s: Annotated[float, Field(ge=0)] = 900.0
    """Duration of a backend's first quarantine, in seconds.
    Each further quarantine is twice as long. With 0, there are only warnings."""
