"""Prices of tokens and of other units: LiteLLM's keys, and Unisono's section `price`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field

from unisono.config.section_base import Section

# At most 1 USD per token, so that the stores can represent sums in micro-USD as integers.
PerToken = Annotated[float, Field(ge=0, le=1)]
# At most 100 USD per image, query, second or character, for the same reason.
PerUnit = Annotated[float, Field(ge=0, le=100)]
PerMillion = Annotated[float, Field(ge=0, le=1e6)]


class Costs(Section):
    """Prices in LiteLLM's keys, in USD per token, image, query, second or character.

    For tokens, `unisono.price` takes precedence.
    """

    input_cost_per_token: PerToken | None = None
    """Price of a prompt token."""
    output_cost_per_token: PerToken | None = None
    """Price of an answer token, including reasoning tokens."""
    cache_read_input_token_cost: PerToken | None = None
    """Price of a prompt token that a backend reads from its cache."""
    input_cost_per_query: PerUnit | None = None
    """Price of a request for embeddings, scores or moderation, or of a search unit in reranking."""
    output_cost_per_image: PerUnit | None = None
    """Price of a generated image."""
    input_cost_per_image: PerUnit | None = None
    """Price of a generated image if `output_cost_per_image` is not set."""
    output_cost_per_second: PerUnit | None = None
    """Price of a second of transcribed audio."""
    input_cost_per_second: PerUnit | None = None
    """Price of a second of transcribed audio if `output_cost_per_second` is not set."""
    input_cost_per_character: PerUnit | None = None
    """Price of a character of text from which speech or an embedding is generated."""

    def get_price(self, key: str) -> float | None:
        """Return the price in the field `key`; None if it is not set."""
        price: float | None = getattr(self, key)
        return price


# Keys with the price of a unit. As in LiteLLM, the prices for input and output are not added; the first key that is set
# applies.
UNIT_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "queries": ("input_cost_per_query",),
    "images": ("output_cost_per_image", "input_cost_per_image"),
    "seconds": ("output_cost_per_second", "input_cost_per_second"),
    "characters": ("input_cost_per_character",),
}
# Units by which models of a mode are billed. Models of all other modes are billed only by tokens.
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

    If a price is not set here, the price in LiteLLM's keys applies, then that in LiteLLM's price list if litellm is
    installed. Otherwise the price is 0.
    """

    input: PerMillion | None = None
    """Price of prompt tokens."""
    output: PerMillion | None = None
    """Price of answer tokens, including reasoning tokens."""
    cached_input: PerMillion | None = None
    """Price of prompt tokens that a backend reads from its cache. By default `input`."""
