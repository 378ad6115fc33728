"""Prices of tokens, in LiteLLM's keys and in Unisono's."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from unisono.config.section import Section

# At most 1 USD per token, so that sums in micro-USD stay within the integers of the stores.
PerToken = Annotated[float, Field(ge=0, le=1)]
PerMillion = Annotated[float, Field(ge=0, le=1e6)]


class Costs(Section):
    """Prices in LiteLLM's keys, in USD per token. `unisono.price` wins."""

    input_cost_per_token: PerToken | None = None
    """Price of a prompt token."""
    output_cost_per_token: PerToken | None = None
    """Price of an answer token, reasoning included."""
    cache_read_input_token_cost: PerToken | None = None
    """Price of a prompt token from the cache of a backend."""


class PriceSettings(Section):
    """Prices in USD per million tokens.

    Without a price here, the keys of LiteLLM apply, then LiteLLM's price list if litellm is installed, else 0.
    """

    input: PerMillion | None = None
    """Price of prompt tokens."""
    output: PerMillion | None = None
    """Price of answer tokens, reasoning included."""
    cached_input: PerMillion | None = None
    """Price of prompt tokens from the cache of a backend. By default `input`."""
