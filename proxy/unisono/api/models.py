"""List of models, `/v1/models`.

Anthropic's clients get Anthropic's format, all other clients OpenAI's. For Codex, OpenAI's list also contains Codex's
model catalogue. A ModelCard contains no address and no key of a backend, so the lists cannot reveal any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from unisono.access.prices import PriceList
from unisono.api.answer_types import ABSENT, AnswerModel, Count, Moment, Object
from unisono.api.codex_models import to_codex_model
from unisono.api.json_response import to_whole
from unisono.api.route_table import RouteTable, dependency
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.errors import InvalidRequest

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
        """True if requests are passed through: the model is not gpt-oss, its abilities are unknown."""
        ...

    @property
    def can_read_images(self) -> bool | None:
        """True if the model receives images in requests, or descriptions of them; None if unknown."""
        ...

    @property
    def is_stored(self) -> bool:
        """True if all deployments of the model are in the store, not in the configuration file."""
        ...


NO_PRICES = PriceList()


@dataclass(frozen=True, slots=True)
class ModelCards:
    """Source of the lists of models.

    `cards` returns the models that a caller may currently use. `created` is the creation time that the lists show for
    every model, as Unix time in seconds. `prices` are the prices of the models.
    """

    cards: Callable[[Caller], Sequence[ModelCard]]
    created: int
    prices: PriceList = NO_PRICES


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


def select_page(cards: Sequence[ModelCard], query: Mapping[str, str]) -> tuple[Sequence[ModelCard], bool]:
    """Return a page of Anthropic's list, and True if there is another page in this direction.

    Raises InvalidRequest for an invalid page size or an unknown id.
    """
    size = _page_size(query.get("limit"), len(cards))
    after, before = query.get("after_id"), query.get("before_id")
    names = [card.id for card in cards]
    for field, name in (("after_id", after), ("before_id", before)):
        if name is not None and name not in names:
            raise InvalidRequest(
                f"'{field}': the list of models has no '{name[:256]}'; use the `id` of a listed model.", param=field
            )
    first = 0 if after is None else names.index(after) + 1
    end = len(names) if before is None else names.index(before)
    rest = cards[first:end]
    page = rest[:size] if before is None else rest[max(0, len(rest) - size) :]
    return page, len(page) < len(rest)


def _page_size(limit: str | None, default: int) -> int:
    if limit is None:
        return default
    if limit.isascii() and limit.isdigit() and 1 <= int(limit[:5]) <= MAX_PAGE_SIZE:
        return int(limit)
    raise InvalidRequest(f"'limit' must be a number from 1 to {MAX_PAGE_SIZE}.", param="limit")


def to_anthropic_list(cards: Sequence[ModelCard], created: int, query: Mapping[str, str]) -> AnthropicModelList:
    selected, has_more = select_page(cards, query)
    models = [to_anthropic_model(card, created) for card in selected]
    ends = (models[0].id, models[-1].id) if models else (None, None)
    return AnthropicModelList(data=models, has_more=has_more, first_id=ends[0], last_id=ends[1])


def to_codex_catalogue(cards: Sequence[ModelCard]) -> list[Object]:
    # The catalogue has only gpt-oss. Codex knows more about models of other providers than the gateway does.
    return [to_codex_model(card.id, card.context, place) for place, card in enumerate(cards) if not card.passes]


def _query_parameter(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": description, "schema": {"type": "string"}}


ANTHROPIC_VERSION: Final = "anthropic-version"
# Codex sends `client_version`; Anthropic's clients send the other parameters.
PARAMETERS: Final = (
    _query_parameter("client_version", "Version of Codex; adds its catalogue `models`."),
    _query_parameter("limit", "Page size in Anthropic's format; by default all models."),
    _query_parameter("after_id", "Model before the page, in Anthropic's format."),
    _query_parameter("before_id", "Model after the page, in Anthropic's format."),
    {**_query_parameter(ANTHROPIC_VERSION, "Version of Anthropic's API; selects its format."), "in": "header"},
)


@MODELS.add("GET", "/models", answer=ModelList | AnthropicModelList, direct=True, parameters=PARAMETERS)
async def list_models(request: Request) -> Response:
    """List the models that the key may use.

    Requests with `anthropic-version` get Anthropic's format.
    """
    known, query = dependency(request, ModelCards), request.query_params
    cards = known.cards(request.state.caller)
    if ANTHROPIC_VERSION in request.headers:
        return to_whole(to_anthropic_list(cards, known.created, query).model_dump())
    listed = ModelList(object="list", data=[to_model(card, known.created) for card in cards])
    # Every program based on Codex sends `client_version` when it reads the list. OpenAI's SDKs accept the unknown key
    # `models`, but strict clients may not, and the instructions for Codex are long.
    if "client_version" in query:
        listed = listed.model_copy(update={"models": to_codex_catalogue(cards)})
    return to_whole(listed.model_dump(exclude_unset=True))
