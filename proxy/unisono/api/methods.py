"""One route per path for all methods, so that a 405 response lists every allowed method.

With a route for each method the framework would list only those of the first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

Endpoint = Callable[[Request], Awaitable[Response]]


def add_path(router: APIRouter, path: str, endpoints: Mapping[str, Endpoint], name: str) -> None:
    """Add a route. `endpoints` maps methods to handlers; HEAD is handled as GET."""

    async def answer(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await endpoints[method](request)

    router.add_route(path, answer, methods=[*endpoints], name=name)
