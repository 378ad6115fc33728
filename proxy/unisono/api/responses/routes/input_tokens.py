"""Route `POST /responses/input_tokens`: the length of a prompt, without generation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from unisono.api.automatic_compaction import request_to_count
from unisono.api.body import read_json, work_size
from unisono.api.disconnects import until_disconnect
from unisono.api.json_response import to_whole
from unisono.api.responses.answer_schema import InputTokens
from unisono.api.responses.continued_history import recall
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.outbound.dialects import Dialect
from unisono.api.responses.prepared_request import Sender, assembled, validate_body
from unisono.api.responses.routes.responses_api import ResponsesApi
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.route_table import MODEL_CALL_ERRORS, RouteTable, dependency, keep_properties
from unisono.core.generation import DEFAULT_CONTEXT

# Fields that change the token count. A count is never stored, so the fields about storage are excluded.
EFFECTIVE_FIELDS = frozenset(ResponsesRequest.model_fields) - {"store", "background", "context_management"}


class CountRequest(ResponsesRequest):
    """Schema of the request in the OpenAPI document, without the fields that have no effect."""

    model_config = ConfigDict(defer_build=True, json_schema_extra=partial(keep_properties, EFFECTIVE_FIELDS))


async def counted(deps: ResponsesDeps, sender: Sender, body: dict[str, Any], size: int) -> int:
    # A count is not stored, so the store is read only for the prior state.
    effective = {**body, "store": False, "background": False}
    request = await validate_body(deps, sender.caller, effective, size, sender.request_id, counted=True)
    model = deps.resolve(request.model, sender.caller)
    past = await recall(deps.store, sender.tenant, request)
    prepared = await assembled(
        deps, sender, request, past, model, response_id=deps.new_id("resp_"), created_at=0, size=size
    )
    request_counted = request_to_count(prepared.generation.request, prepared.generation.compaction)
    prompt = replace(request_counted.prompt, counted_window=model.window() or DEFAULT_CONTEXT)
    return await deps.service.count(replace(request_counted, prompt=prompt))


def add_counting_route(table: RouteTable, dialect: Dialect) -> None:
    @table.add("POST", "/responses/input_tokens", MODEL_CALL_ERRORS, answer=InputTokens, body=CountRequest, direct=True)
    async def count_input_tokens(request: Request) -> Response:
        """Count the input tokens of a request."""
        deps = dependency(request, ResponsesApi).deps
        body = await read_json(request)
        sender = Sender(request.state.caller, request.state.request_id, dialect)
        work = counted(deps, sender, body, work_size(await request.body()))
        tokens = await until_disconnect(request, work)
        return to_whole({"object": "response.input_tokens", "input_tokens": tokens})
