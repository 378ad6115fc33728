"""What tokens cost: LiteLLM's keys, and ours."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from unisono.config.section import Section

# No dearer than 1 USD for a token: sums in micro-USD stay within what stores can count.
PerToken = Annotated[float, Field(ge=0, le=1)]
PerMillion = Annotated[float, Field(ge=0, le=1e6)]


class Costs(Section):
    """What LiteLLM calls prices: USD for one token."""

    input_cost_per_token: PerToken | None = None
    """Of a prompt."""
    output_cost_per_token: PerToken | None = None
    """Of an answer."""
    cache_read_input_token_cost: PerToken | None = None
    """Of a prompt, where a backend had it in its cache."""


class PriceSettings(Section):
    """USD for a million tokens; what is not given is LiteLLM's where that says it, else nothing."""

    input: PerMillion | None = None
    """For prompts."""
    output: PerMillion | None = None
    """For answers, thoughts included."""
    cached_input: PerMillion | None = None
    """For tokens of a prompt that a backend had in its cache; by default as all others."""
