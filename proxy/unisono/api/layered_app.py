"""Application with ASGI layers in front of FastAPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send


class LayeredApp(FastAPI):
    """FastAPI application behind `layers`, outermost first.

    One of them must be `ErrorResponses`. Some of FastAPI's and Starlette's own layers run in front of those in
    `FastAPI(middleware=...)`. Here all of them run behind `layers`, so that a request to one of the `DirectRoutes`
    passes none of them.
    """

    def __init__(self, *, layers: Sequence[Middleware], **options: Any) -> None:
        super().__init__(**options)
        # Starlette's outermost layer would answer unexpected exceptions before `ErrorResponses` receives them.
        self.add_exception_handler(Exception, _raise_again)
        app: ASGIApp = super().__call__
        for layer, args, kwargs in reversed(layers):
            app = layer(app, *args, **kwargs)
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Endpoints and layers find the application in the scope.
        scope["app"] = self
        await self._app(scope, receive, send)


async def _raise_again(_: Request, error: Exception) -> Response:
    raise error
