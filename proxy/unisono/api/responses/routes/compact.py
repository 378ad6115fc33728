"""Route `POST /responses/compact`: compaction of a conversation."""

from __future__ import annotations

from functools import partial

from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from unisono.api.answer_headers import backend_header, recoveries_header
from unisono.api.body import read_model_request, work_size
from unisono.api.disconnects import until_disconnect
from unisono.api.json_response import to_whole
from unisono.api.responses.answer_schema import Compaction
from unisono.api.responses.compaction import EFFECTIVE_FIELDS, compacted, to_compaction
from unisono.api.responses.outbound.dialects import Dialect
from unisono.api.responses.prepared_request import Sender
from unisono.api.responses.routes.responses_api import ResponsesApi
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.route_table import ANSWER_HEADERS, MODEL_CALL_ERRORS, RouteTable, dependency, keep_properties


class CompactRequest(ResponsesRequest):
    """Body in the OpenAPI document: a Responses request without the fields that have no effect."""

    model_config = ConfigDict(defer_build=True, json_schema_extra=partial(keep_properties, EFFECTIVE_FIELDS))


def add_compact_route(table: RouteTable, dialect: Dialect) -> None:
    @table.add(
        "POST",
        "/responses/compact",
        MODEL_CALL_ERRORS,
        answer=Compaction,
        headers=ANSWER_HEADERS,
        body=CompactRequest,
        direct=True,
    )
    async def compact_response(request: Request) -> Response:
        """Compact a conversation."""
        deps = dependency(request, ResponsesApi).deps
        body = await read_model_request(request, "user", "safety_identifier")
        sender = Sender(request.state.caller, request.state.request_id, dialect)
        work = compacted(deps, sender, body, work_size(await request.body()))
        done = await until_disconnect(request, work)
        headers = {**backend_header([done.report]), **recoveries_header([done.report])}
        return to_whole(to_compaction(done, dialect, deps.new_id), headers)
