"""Model lists: OpenAI's `/v1/models` and LiteLLM's `/model/info`, from the same cards.

A card contains no address and no key, so these lists cannot reveal backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from unisono.api.whole import to_whole
from unisono.core.access import Caller
from unisono.errors import UnknownModel


class ModelCard(Protocol):
    """Public data of a model. `context` is in tokens, None if unknown."""

    @property
    def id(self) -> str: ...

    @property
    def context(self) -> int | None: ...

    @property
    def owned_by(self) -> str: ...

    @property
    def passes(self) -> bool:
        """True if the model is not gpt-oss, so that its abilities are unknown."""
        ...


def to_model(card: ModelCard, created: int) -> dict[str, Any]:
    """Return OpenAI's model object, with the context length under its two usual names."""
    model: dict[str, Any] = {"id": card.id, "object": "model", "created": created, "owned_by": card.owned_by}
    if card.context is not None:
        model |= {"context_length": card.context, "max_model_len": card.context}
    return model


def to_model_info(card: ModelCard) -> dict[str, Any]:
    """Return LiteLLM's entry of `/model/info`, without data for operators only."""
    return {
        "model_name": card.id,
        "litellm_params": {"model": card.id},
        "model_info": {
            "id": card.id,
            "mode": "chat",
            "max_input_tokens": card.context,
            "max_tokens": card.context,
            "supports_function_calling": None if card.passes else True,
            "supports_reasoning": None if card.passes else True,
            "supports_vision": None if card.passes else False,
        },
    }


def models_router(*, cards: Callable[[Caller], Sequence[ModelCard]], created: int) -> APIRouter:
    """Return the router of the model lists.

    `cards` returns the current models of a caller. `created` is in seconds since the epoch, equal for all.
    """

    async def listed(request: Request) -> Response:
        return to_whole({"object": "list", "data": [to_model(card, created) for card in cards(request.state.caller)]})

    async def one(request: Request) -> Response:
        name = request.path_params["model"]
        for card in cards(request.state.caller):
            if card.id == name:
                return to_whole(to_model(card, created))
        raise UnknownModel(f"The model '{name[:256]}' does not exist.", param="model")

    async def info(request: Request) -> Response:
        return to_whole({"data": [to_model_info(card) for card in cards(request.state.caller)]})

    router = APIRouter()
    for prefix in ("/v1", ""):
        router.add_route(f"{prefix}/models", listed, methods=["GET"], name="models")
        # Names contain slashes: `openai/gpt-oss-120b`.
        router.add_route(f"{prefix}/models/{{model:path}}", one, methods=["GET"], name="model")
        router.add_route(f"{prefix}/model/info", info, methods=["GET"], name="model_info")
    return router
