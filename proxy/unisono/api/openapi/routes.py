"""`GET /openapi.json`: the document, for whoever has a key."""

from __future__ import annotations

from functools import cache

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response


def document_router() -> APIRouter:
    """Expects the layers of `api.door` in front. Nothing is made before somebody asks."""

    async def shown(_: Request) -> Response:
        return Response(_written(), media_type="application/json")

    router = APIRouter()
    router.add_route("/openapi.json", shown, methods=["GET"], name="openapi")
    return router


@cache
def _written() -> bytes:
    from unisono.api.openapi.document import document

    return orjson.dumps(document())
