"""Routes of models that generate no text: embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from unisono.api.body import off_loop, read_model_request
from unisono.api.modes.inbound import requested_model, to_generation_request
from unisono.api.modes.schema import EmbeddingList, EmbeddingsRequest
from unisono.api.passthrough_routes import whole
from unisono.api.route_table import ANSWER_HEADERS, MODEL_CALL_ERRORS, RouteTable, dependency
from unisono.api.sse import until_disconnect
from unisono.api.unisono_object import backend_header
from unisono.api.whole import to_whole
from unisono.core.access import Caller
from unisono.core.passthrough_request import Api
from unisono.engine.request import GenerationService

OTHER_MODES = RouteTable("other modes")


@dataclass(frozen=True, slots=True)
class ModeModel:
    """Model data for these APIs: the group of the model."""

    group: str


# Find a model by its name, with aliases and defaults applied. Raises UnknownModel, ModelNotAllowed, and
# UnsupportedValue if its mode does not fit the API.
FindModel = Callable[[Api, str, Caller], ModeModel]


@dataclass(frozen=True, slots=True)
class ModeRoute:
    """Handler of the APIs whose models generate no text."""

    service: GenerationService
    find: FindModel

    async def answer(self, request: Request, api: Api) -> Response:
        body = await read_model_request(request, "user")
        caller: Caller = request.state.caller
        model = self.find(api, requested_model(body), caller)
        generation_request = await off_loop(
            lambda: to_generation_request(api, body, model.group, caller, request.state.request_id),
            len(await request.body()),
        )
        stream = self.service.start(generation_request)
        answer = await until_disconnect(request.receive, whole(stream))
        return to_whole(answer, backend_header([stream.report]))


@OTHER_MODES.add(
    "POST",
    "/embeddings",
    MODEL_CALL_ERRORS,
    answer=EmbeddingList,
    headers=ANSWER_HEADERS,
    body=EmbeddingsRequest,
    direct=True,
)
async def create_embeddings(request: Request) -> Response:
    """Create embeddings, with a model of the mode `embedding`."""
    return await dependency(request, ModeRoute).answer(request, Api.EMBEDDINGS)
