"""Route `POST /responses/compact`: compaction of a conversation."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from unisono.api.body import read_json
from unisono.api.responses.compaction import compacted, to_compaction
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.outbound.dialects import Dialect
from unisono.api.responses.prepared_request import Sender
from unisono.api.sse import CLIENT_CLOSED_REQUEST, ClientGone, until_disconnect
from unisono.api.unisono_object import backend_header, recoveries_header
from unisono.api.whole import to_whole


def compact_routes(router: APIRouter, path: str, means: ResponsesDeps, dialect: Dialect) -> None:
    """Add the route. `path` is the path of the responses."""

    async def compact(request: Request) -> Response:
        body = await read_json(request)
        sender = Sender(request.state.caller, request.state.request_id, dialect)
        work = compacted(means, sender, body, len(await request.body()))
        try:
            done = await until_disconnect(request.receive, work)
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        headers = {**backend_header([done.report]), **recoveries_header([done.report])}
        return to_whole(to_compaction(done, dialect, means.new_id), headers)

    router.add_route(f"{path}/compact", compact, methods=["POST"], name="compact")
