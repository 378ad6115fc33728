"""Route `GET /openapi.json`, which requires a key."""

from __future__ import annotations

from functools import cache

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response


def document_router() -> APIRouter:
    """Return the router of the document, which is built on the first request.

    The layers of `api.asgi_layers` must run first.
    """

    async def shown(_: Request) -> Response:
        return Response(_written(), media_type="application/json")

    router = APIRouter()
    router.add_route("/openapi.json", shown, methods=["GET"], name="openapi")
    return router


@cache
def _written() -> bytes:
    from unisono.api.openapi.document import document

    return orjson.dumps(document())
