"""Prices of tokens and of other units, in LiteLLM's keys and in Unisono's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field

from unisono.config.section import Section

# At most 1 USD per token, so that sums in micro-USD stay within the integers of the stores.
PerToken = Annotated[float, Field(ge=0, le=1)]
# At most 100 USD for an image or another unit, for the same reason.
PerUnit = Annotated[float, Field(ge=0, le=100)]
PerMillion = Annotated[float, Field(ge=0, le=1e6)]


class Costs(Section):
    """Prices in LiteLLM's keys, in USD per token or other unit.

    `unisono.price` wins for tokens.
    """

    input_cost_per_token: PerToken | None = None
    """Price of a prompt token."""
    output_cost_per_token: PerToken | None = None
    """Price of an answer token, reasoning included."""
    cache_read_input_token_cost: PerToken | None = None
    """Price of a prompt token from the cache of a backend."""
    input_cost_per_query: PerUnit | None = None
    """Price of a request for embeddings, scores or moderation, or of a reranker's search unit."""
    output_cost_per_image: PerUnit | None = None
    """Price of a generated image."""
    input_cost_per_image: PerUnit | None = None
    """Price of a generated image if `output_cost_per_image` is not set."""
    output_cost_per_second: PerUnit | None = None
    """Price of a second of transcribed audio."""
    input_cost_per_second: PerUnit | None = None
    """Price of a second of transcribed audio if `output_cost_per_second` is not set."""
    input_cost_per_character: PerUnit | None = None
    """Price of a character of a text to speak or to embed."""

    def get_price(self, key: str) -> float | None:
        """Return the price of a key of LiteLLM."""
        price: float | None = getattr(self, key)
        return price


# Keys of the price of a unit. As in LiteLLM, the prices of its two sides are not added; the first one applies.
UNIT_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "queries": ("input_cost_per_query",),
    "images": ("output_cost_per_image", "input_cost_per_image"),
    "seconds": ("output_cost_per_second", "input_cost_per_second"),
    "characters": ("input_cost_per_character",),
}
# Units by which models are billed, by their mode. Others are billed by tokens only.
MODE_UNITS: Final[Mapping[str, tuple[str, ...]]] = {
    "embedding": ("queries", "characters"),
    "rerank": ("queries",),
    "score": ("queries",),
    "moderation": ("queries",),
    "image_generation": ("images",),
    "audio_transcription": ("seconds",),
    "audio_speech": ("characters",),
}


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
