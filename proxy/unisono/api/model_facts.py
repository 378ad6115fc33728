"""Facts about single models and model groups.

The routes are `/v1/models/{model}` and LiteLLM's `/model_group/info`. `to_litellm_model` returns an entry of LiteLLM's
`/model/info`, a route of the admin API.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Query

from unisono.access.prices import FREE, PriceList
from unisono.api.answer_types import AnswerModel, Count
from unisono.api.dependencies import CurrentCaller, PathId, check_query, provided
from unisono.api.models import NO_PRICES, AnthropicModel, Model, ModelCard, ModelCards, to_anthropic_model, to_model
from unisono.api.route_table import READ_404, RouteTable
from unisono.errors import UnknownModel

MODEL_FACTS = RouteTable("models", failure="ModelsFailure")

Cards = Annotated[ModelCards, provided(ModelCards)]
AnthropicVersion = Annotated[str | None, Header(description="Version of Anthropic's API.")]


class ModelParams(AnswerModel):
    model: str


class ModelFacts(AnswerModel):
    id: str
    db_model: bool
    mode: str
    max_input_tokens: Count | None
    max_tokens: Count | None
    supports_function_calling: bool | None
    supports_reasoning: bool | None
    supports_vision: bool | None
    input_cost_per_token: float | None
    output_cost_per_token: float | None
    cache_read_input_token_cost: float | None
    input_cost_per_query: float | None
    output_cost_per_image: float | None
    input_cost_per_second: float | None
    input_cost_per_character: float | None


class LiteLlmModel(AnswerModel):
    """LiteLLM's entry of `/model/info`, without data for operators only."""

    model_name: str
    litellm_params: ModelParams
    model_info: ModelFacts


class ModelGroup(AnswerModel):
    """LiteLLM's entry of `/model_group/info`. An unknown capability is False, as in LiteLLM."""

    model_group: str
    providers: list[str]
    mode: str
    max_input_tokens: Count | None
    max_output_tokens: Count | None
    supports_function_calling: bool
    supports_parallel_function_calling: bool
    supports_reasoning: bool
    supports_vision: bool
    input_cost_per_token: float | None
    output_cost_per_token: float | None


class ModelGroupList(AnswerModel):
    data: list[ModelGroup]


def costs_per_token(card: ModelCard, prices: PriceList) -> tuple[float | None, float | None, float | None]:
    """Return the prices of input, output and cached input in USD per token.

    All three are None for a model without a price, such as an alias.
    """
    price = prices.of_model.get(card.id)
    if price is None:
        return None, None, None
    return price.input / 1e12, price.output / 1e12, price.cached / 1e12


def costs_per_unit(card: ModelCard, prices: PriceList) -> dict[str, float | None]:
    """Return the prices in USD per unit, by LiteLLM's names; None for a unit without a price."""
    price = prices.of_model.get(card.id, FREE)
    units = {
        "input_cost_per_query": price.queries,
        "output_cost_per_image": price.images,
        "input_cost_per_second": price.seconds,
        "input_cost_per_character": price.characters,
    }
    return {key: each / 1e12 if each else None for key, each in units.items()}


def to_litellm_model(card: ModelCard, prices: PriceList = NO_PRICES) -> LiteLlmModel:
    sent, generated, cached = costs_per_token(card, prices)
    return LiteLlmModel(
        model_name=card.id,
        litellm_params=ModelParams(model=card.id),
        model_info=ModelFacts(
            id=card.id,
            db_model=card.is_stored,
            mode=card.mode,
            max_input_tokens=card.context,
            max_tokens=card.context,
            supports_function_calling=None if card.passes else True,
            supports_reasoning=None if card.passes else True,
            supports_vision=card.can_read_images,
            input_cost_per_token=sent,
            output_cost_per_token=generated,
            cache_read_input_token_cost=cached,
            **costs_per_unit(card, prices),
        ),
    )


# Names contain slashes: `openai/gpt-oss-120b`.
@MODEL_FACTS.add("GET", "/models/{model:path}", READ_404, response_model_exclude_unset=True)
async def get_model(
    known: Cards, caller: CurrentCaller, model: PathId, anthropic_version: AnthropicVersion = None
) -> Model | AnthropicModel:
    """Retrieve a model, in Anthropic's format for requests with `anthropic-version`."""
    convert = to_model if anthropic_version is None else to_anthropic_model
    for card in known.cards(caller):
        if card.id == model:
            return convert(card, known.created)
    raise UnknownModel(f"The model '{model[:256]}' does not exist.", param="model")


def to_model_group(card: ModelCard, prices: PriceList) -> ModelGroup:
    sent, generated, _ = costs_per_token(card, prices)
    return ModelGroup(
        model_group=card.id,
        providers=[card.owned_by],
        mode=card.mode,
        max_input_tokens=card.context,
        max_output_tokens=card.context,
        supports_function_calling=not card.passes,
        supports_parallel_function_calling=not card.passes,
        supports_reasoning=not card.passes,
        supports_vision=bool(card.can_read_images),
        input_cost_per_token=sent,
        output_cost_per_token=generated,
    )


@MODEL_FACTS.add("GET", "/model_group/info", dependencies=[Depends(check_query)])
async def list_model_groups(
    known: Cards, caller: CurrentCaller, model_group: Annotated[str | None, Query()] = None
) -> ModelGroupList:
    """List the model groups in LiteLLM's format, or one of them."""
    groups = [to_model_group(card, known.prices) for card in known.cards(caller) if model_group in (None, card.id)]
    return ModelGroupList(data=groups)
