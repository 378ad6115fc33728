"""One route for each path, whatever methods it has: who comes with a wrong one is told all the right ones.

With a route for each method the framework would name only those of the first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

Endpoint = Callable[[Request], Awaitable[Response]]


def add_path(router: APIRouter, path: str, endpoints: Mapping[str, Endpoint], name: str) -> None:
    """`endpoints` are by method; HEAD is GET."""

    async def answer(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await endpoints[method](request)

    router.add_route(path, answer, methods=[*endpoints], name=name)
