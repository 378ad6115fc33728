"""Route `POST /responses/input_tokens`: the length of a prompt, without generation."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from unisono.api.body import read_json
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.outbound.dialects import Dialect
from unisono.api.responses.prepared_request import Sender, assembled, judged
from unisono.api.responses.prior_state import recall
from unisono.api.sse import CLIENT_CLOSED_REQUEST, ClientGone, until_disconnect
from unisono.api.whole import to_whole


def counting_routes(router: APIRouter, path: str, means: ResponsesDeps, dialect: Dialect) -> None:
    """Add the route. `path` is the path of the responses."""

    async def counted(sender: Sender, body: dict[str, Any], size: int) -> int:
        # A count is not stored, so the store is read only for the prior state.
        wanted = await judged({**body, "store": False, "background": False}, size)
        model = means.resolve(wanted.model, sender.caller)
        past = await recall(means.store, sender.tenant, wanted)
        asked = await assembled(
            means, sender, wanted, past, model, response_id=means.new_id("resp_"), created_at=0, size=size
        )
        return await means.service.count(asked.generation.request)

    async def count(request: Request) -> Response:
        body = await read_json(request)
        sender = Sender(request.state.caller, request.state.request_id, dialect)
        work = counted(sender, body, len(await request.body()))
        try:
            tokens = await until_disconnect(request.receive, work)
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return to_whole({"object": "response.input_tokens", "input_tokens": tokens})

    router.add_route(f"{path}/input_tokens", count, methods=["POST"], name="input_tokens")
