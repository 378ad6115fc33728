"""ASGI application of the gateway: layers, `direct` routes, and FastAPI for other routes.

The modules of an API, and FastAPI with the modules of its routes, are imported in a thread for the first request that
needs them, because many gateways serve only one API. FastAPI alone takes 0.2 s and 10 MB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from starlette.datastructures import State
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from unisono.api.body import DirectRequest
from unisono.api.path_aliases import PathAliases
from unisono.api.route_table import GatewayRoute
from unisono.core.frozen import dataclass

if TYPE_CHECKING:
    from fastapi import FastAPI


# Function that returns the context manager of the application's lifetime.
Lifespan = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class LazyRoutes:
    """Routes whose modules are imported for the first request to one of these routes.

    The path of each route starts with one of `path_prefixes`. `load` is called in a thread. It puts the dependencies
    of the routes into the state of the application, and returns the routes.
    """

    path_prefixes: tuple[str, ...]
    load: Callable[[State], Iterable[BaseRoute]]


class LayeredApp:
    """ASGI application with `layers`, outermost first, one of which must be `ErrorResponses`.

    The application itself calls the WebSocket endpoints, and the `direct` endpoints whose paths have no parameters.
    Starlette and FastAPI would need ten more layers per request. A FastAPI application of all routes answers the other
    requests. `build_fastapi` is called once, after all `lazy` routes are loaded, with the `state` that FastAPI must
    share with this application.
    """

    def __init__(
        self,
        *,
        layers: Sequence[Middleware],
        routes: Iterable[BaseRoute],
        lazy: Iterable[LazyRoutes] = (),
        build_fastapi: Callable[[State], FastAPI],
        lifespan: Lifespan,
    ) -> None:
        self.state = State()
        self.lifespan = lifespan
        self._direct: dict[tuple[str | None, str], GatewayRoute | WebSocketRoute] = {}
        self._add_direct(routes)
        # Routes that are not loaded yet.
        self._lazy = [*lazy]
        self._build_fastapi = build_fastapi
        self._loading = asyncio.Lock()
        self._fastapi: FastAPI | None = None
        app: ASGIApp = self._answer
        for layer, args, kwargs in reversed(layers):
            app = layer(app, *args, **kwargs)
        self._layers = app
        self._app = PathAliases(self._enter)

    @property
    def routes(self) -> Sequence[BaseRoute]:
        """All routes if the FastAPI application is built, else only the `direct` routes."""
        return [*self._direct.values()] if self._fastapi is None else self._fastapi.router.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Endpoints and layers find the application in the scope.
        scope["app"] = self
        if scope["type"] == "lifespan":
            await Router(lifespan=lambda _: self.lifespan()).lifespan(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _add_direct(self, routes: Iterable[BaseRoute]) -> None:
        for route in routes:
            if isinstance(route, GatewayRoute | WebSocketRoute) and "{" not in route.path:
                self._direct |= {(method, route.path): route for method in _direct_methods(route)}

    def _enter(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if self._fastapi is not None or self._direct_route(scope) is not None:
            return self._layers(scope, receive, send)
        return self._load_and_enter(scope, receive, send)

    async def _load_and_enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Routes are loaded before the layers run, because the record of a request names the request's route, even if a
        # layer refuses the request.
        async with self._loading:
            for lazy in [*self._lazy]:
                if scope["path"].startswith(lazy.path_prefixes):
                    await self._load(lazy)
            if self._fastapi is None and self._direct_route(scope) is None:
                for lazy in [*self._lazy]:
                    await self._load(lazy)
                self._fastapi = await asyncio.to_thread(self._build_fastapi, self.state)
        await self._layers(scope, receive, send)

    async def _load(self, lazy: LazyRoutes) -> None:
        self._add_direct(await asyncio.to_thread(lazy.load, self.state))
        self._lazy.remove(lazy)

    def _direct_route(self, scope: Scope) -> GatewayRoute | WebSocketRoute | None:
        # A WebSocket has no method.
        return self._direct.get((scope.get("method"), scope["path"]))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._direct_route(scope)
        if route is None:
            assert self._fastapi is not None
            await self._fastapi(scope, receive, send)
            return
        scope["route"] = route
        # `ErrorResponses` receives the exceptions of the endpoint.
        if isinstance(route, WebSocketRoute):
            await route.app(scope, receive, send)
        else:
            response = await route.endpoint(DirectRequest(scope, receive, send))
            await response(scope, receive, send)


def _direct_methods(route: GatewayRoute | WebSocketRoute) -> Iterable[str | None]:
    """Return the methods that a route answers without FastAPI; for a WebSocket, only None."""
    if isinstance(route, WebSocketRoute):
        return (None,)
    return route.methods or () if route.is_direct else ()
