"""Model lists from the same cards: `/v1/models`, and LiteLLM's `/model_group/info`.

`/v1/models` has the format of Anthropic for its clients, and that of OpenAI for all others. Codex finds its own
catalogue beside the latter.

A card contains no address and no key, so these lists cannot reveal backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal, Protocol

from fastapi import Depends, Header, Query
from pydantic import Field

from unisono.access.prices import FREE, PriceList
from unisono.api.answer_types import ABSENT, AnswerModel, Count, Moment, Object
from unisono.api.codex_models import to_codex_model
from unisono.api.field_types import QueryModel
from unisono.api.route_table import READ_404, CurrentCaller, PathId, RouteTable, check_query, provided
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.errors import InvalidRequest, UnknownModel

MODELS = RouteTable("models", failure="ModelsFailure")
MAX_PAGE_SIZE = 1000


class ModelCard(Protocol):
    """Public data of a model. `context` is in tokens, None if unknown."""

    @property
    def id(self) -> str: ...

    @property
    def context(self) -> int | None: ...

    @property
    def owned_by(self) -> str: ...

    @property
    def mode(self) -> str: ...

    @property
    def passes(self) -> bool:
        """True if the model is not gpt-oss, so that its abilities are unknown."""
        ...

    @property
    def is_stored(self) -> bool:
        """True if all its deployments are in the store, none in the configuration file."""
        ...


NO_PRICES = PriceList()


@dataclass(frozen=True, slots=True)
class ModelCards:
    """Source of the lists.

    `cards` returns the current models of a caller. `created` is in seconds since the epoch, equal for all. `prices` are
    those of the models.
    """

    cards: Callable[[Caller], Sequence[ModelCard]]
    created: int
    prices: PriceList = NO_PRICES


Cards = Annotated[ModelCards, provided(ModelCards)]
AnthropicVersion = Annotated[str | None, Header(description="Version of Anthropic's API.")]


class Model(AnswerModel):
    """OpenAI's model object, with its mode, and the context length under its two usual names."""

    id: str
    object: Literal["model"]
    created: Moment
    owned_by: str
    mode: Annotated[str, Field(description="LiteLLM's type of the model; `chat` if it generates text.")]
    context_length: Count = ABSENT
    max_model_len: Count = ABSENT


class ModelList(AnswerModel):
    """OpenAI's list; `models` is Codex's catalogue."""

    object: Literal["list"]
    data: list[Model]
    models: list[Object] = ABSENT


class AnthropicModel(AnswerModel):
    """Anthropic's model object. `max_input_tokens` is the context window."""

    id: str
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: Count | None
    max_tokens: Count | None


class AnthropicModelList(AnswerModel):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


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
    """LiteLLM's entry of `/model_group/info`."""

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


def to_model(card: ModelCard, created: int) -> Model:
    model = Model(id=card.id, object="model", created=created, owned_by=card.owned_by, mode=card.mode)
    return (
        model
        if card.context is None
        else model.model_copy(update={"context_length": card.context, "max_model_len": card.context})
    )


def to_anthropic_model(card: ModelCard, created: int) -> AnthropicModel:
    return AnthropicModel(
        id=card.id,
        type="model",
        display_name=card.id,
        created_at=datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        lifecycle="active",
        max_input_tokens=card.context,
        max_tokens=card.context,
    )


def costs_per_token(card: ModelCard, prices: PriceList) -> tuple[float | None, float | None, float | None]:
    """Return USD per token of input, output and cached input; None for the alias of a model."""
    price = prices.of_model.get(card.id)
    if price is None:
        return None, None, None
    return price.input / 1e12, price.output / 1e12, price.cached / 1e12


def costs_per_unit(card: ModelCard, prices: PriceList) -> dict[str, float | None]:
    """Return USD per unit, by LiteLLM's keys; None for units that the model is not billed by."""
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
            supports_vision=None if card.passes else False,
            input_cost_per_token=sent,
            output_cost_per_token=generated,
            cache_read_input_token_cost=cached,
            **costs_per_unit(card, prices),
        ),
    )


class ModelsQuery(QueryModel):
    """Query parameters of Codex and of Anthropic's clients."""

    client_version: Annotated[str, Field(description="Version of Codex; adds its catalogue `models`.")] | None = None
    limit: Annotated[str, Field(description="Page size in Anthropic's format; by default all models.")] | None = None
    after_id: str | None = None
    before_id: str | None = None


def select_page(cards: Sequence[ModelCard], query: ModelsQuery) -> tuple[Sequence[ModelCard], bool]:
    """Return a page of Anthropic's list, and whether there are more models in its direction.

    Raises InvalidRequest for an invalid page size or an unknown id.
    """
    size = _page_size(query.limit, len(cards))
    names = [card.id for card in cards]
    for field, name in (("after_id", query.after_id), ("before_id", query.before_id)):
        if name is not None and name not in names:
            raise InvalidRequest(f"{field}: unknown model '{name[:256]}'; use an id of this list.", param=field)
    first = 0 if query.after_id is None else names.index(query.after_id) + 1
    end = len(names) if query.before_id is None else names.index(query.before_id)
    rest = cards[first:end]
    page = rest[:size] if query.before_id is None else rest[max(0, len(rest) - size) :]
    return page, len(page) < len(rest)


def _page_size(limit: str | None, default: int) -> int:
    if limit is None:
        return default
    if limit.isascii() and limit.isdigit() and 1 <= int(limit[:5]) <= MAX_PAGE_SIZE:
        return int(limit)
    raise InvalidRequest(f"limit: must be a number from 1 to {MAX_PAGE_SIZE}.", param="limit")


def to_anthropic_list(cards: Sequence[ModelCard], created: int, query: ModelsQuery) -> AnthropicModelList:
    selected, has_more = select_page(cards, query)
    models = [to_anthropic_model(card, created) for card in selected]
    ends = (models[0].id, models[-1].id) if models else (None, None)
    return AnthropicModelList(data=models, has_more=has_more, first_id=ends[0], last_id=ends[1])


def to_codex_catalogue(cards: Sequence[ModelCard]) -> list[Object]:
    # Codex knows more about the models of other providers than the gateway.
    return [to_codex_model(card.id, card.context, place) for place, card in enumerate(cards) if not card.passes]


@MODELS.add("GET", "/models", response_model_exclude_unset=True)
async def list_models(
    known: Cards,
    caller: CurrentCaller,
    query: Annotated[ModelsQuery, Query()],
    anthropic_version: AnthropicVersion = None,
) -> ModelList | AnthropicModelList:
    """List the models that the key may use.

    Requests with `anthropic-version` get Anthropic's format.
    """
    cards = known.cards(caller)
    if anthropic_version is not None:
        return to_anthropic_list(cards, known.created, query)
    listed = ModelList(object="list", data=[to_model(card, known.created) for card in cards])
    # Every version of Codex that reads the list sends its version, whatever the name of its program. OpenAI's SDKs
    # accept an unknown key, but strict clients may not, and the instructions for Codex are long.
    return listed if query.client_version is None else listed.model_copy(update={"models": to_codex_catalogue(cards)})


# Names contain slashes: `openai/gpt-oss-120b`.
@MODELS.add("GET", "/models/{model:path}", READ_404, response_model_exclude_unset=True)
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
        mode="chat",
        max_input_tokens=card.context,
        max_output_tokens=card.context,
        supports_function_calling=not card.passes,
        supports_parallel_function_calling=False,
        supports_reasoning=not card.passes,
        supports_vision=False,
        input_cost_per_token=sent,
        output_cost_per_token=generated,
    )


@MODELS.add("GET", "/model_group/info", dependencies=[Depends(check_query)])
async def list_model_groups(
    known: Cards, caller: CurrentCaller, model_group: Annotated[str | None, Query()] = None
) -> ModelGroupList:
    """List the model groups in LiteLLM's format, or one of them."""
    groups = [to_model_group(card, known.prices) for card in known.cards(caller) if model_group in (None, card.id)]
    return ModelGroupList(data=groups)
