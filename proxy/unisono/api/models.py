"""Which models there are: OpenAI's list and LiteLLM's `/model/info`, from the same cards.

A card holds no address and no key, so nothing about the backends' whereabouts can leak from here.
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
    """What is public about a model. `context` is in tokens, None when unknown."""

    @property
    def id(self) -> str: ...

    @property
    def context(self) -> int | None: ...

    @property
    def owned_by(self) -> str: ...

    @property
    def passes(self) -> bool:
        """Whether it is not gpt-oss, so that nobody here knows what it can do."""
        ...


def to_model(card: ModelCard, created: int) -> dict[str, Any]:
    """OpenAI's model object, with the context under the two names clients look for."""
    model: dict[str, Any] = {"id": card.id, "object": "model", "created": created, "owned_by": card.owned_by}
    if card.context is not None:
        model |= {"context_length": card.context, "max_model_len": card.context}
    return model


def to_model_info(card: ModelCard) -> dict[str, Any]:
    """LiteLLM's entry of `/model/info`, without what only operators may know."""
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
    """`cards` gives the models of a caller as they are now; `created` is in seconds since the epoch, equal for all."""

    async def listed(request: Request) -> Response:
        return to_whole({"object": "list", "data": [to_model(card, created) for card in cards(request.state.caller)]})

    async def one(request: Request) -> Response:
        name = request.path_params["model"]
        for card in cards(request.state.caller):
            if card.id == name:
                return to_whole(to_model(card, created))
        raise UnknownModel(f"There is no model '{name[:256]}'.", param="model")

    async def info(request: Request) -> Response:
        return to_whole({"data": [to_model_info(card) for card in cards(request.state.caller)]})

    router = APIRouter()
    for prefix in ("/v1", ""):
        router.add_route(f"{prefix}/models", listed, methods=["GET"], name="models")
        # Names hold slashes: `openai/gpt-oss-120b`.
        router.add_route(f"{prefix}/models/{{model:path}}", one, methods=["GET"], name="model")
        router.add_route(f"{prefix}/model/info", info, methods=["GET"], name="model_info")
    return router
