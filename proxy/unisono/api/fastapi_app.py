"""FastAPI application, which answers the routes that are not `direct`.

Its exception handlers answer FastAPI's own exceptions: unknown paths, wrong methods, invalid bodies and queries.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from unisono import __version__
from unisono.api.error_responses import CLIENT_CLOSED_REQUEST, ClientGone, failure_of, invalid, to_response
from unisono.errors import MethodNotAllowed, NotFound, UnisonoError


def fastapi_app(routes: Iterable[BaseRoute], state: State | None = None) -> FastAPI:
    """Return the FastAPI application of `routes`. Endpoints find their dependencies in `state`.

    The layers of `api.asgi_layers` must run first: they put the caller and the request id into the scope. The routes
    are in one flat list: FastAPI needs 74 us to dispatch to an included router, and 46 us to a route in the list.
    """
    app = FastAPI(
        title="Unisono",
        version=__version__,
        # The OpenAPI document is one of the routes, because it requires a key.
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    if state is not None:
        app.state = state
    register(app)
    app.router.routes.extend(routes)
    return app


def register(app: FastAPI) -> None:
    """Register handlers that answer FastAPI's own exceptions in the gateway's error format."""

    async def answer(request: Request, error: Exception) -> Response:
        if request.scope["type"] == "websocket":
            # Only the layer `ErrorResponses` knows whether the WebSocket was accepted already.
            raise error
        failure = _to_failure(error)
        if isinstance(failure, NotFound) and isinstance(error, HTTPException):
            failure = NotFound(f"There is no endpoint for {request.method} {request.scope['path'][:200]}.")
        elif isinstance(failure, MethodNotAllowed):
            failure = MethodNotAllowed(f"The method {request.method} is not allowed at {request.scope['path'][:200]}.")
        response = to_response(failure, request.scope)
        if isinstance(failure, MethodNotAllowed):
            # Each method of a path is a separate route, and the framework lists the methods of one route only.
            routes = [each for each in app.router.routes if isinstance(each, Route)]
            path = next(each.path for each in routes if each.matches(request.scope)[0] is not Match.NONE)
            methods = {method for each in routes if each.path == path for method in each.methods or ()}
            response.headers["allow"] = ", ".join(sorted(methods))
        elif isinstance(error, HTTPException) and error.headers:
            response.headers.update(error.headers)
        return response

    async def close(request: Request, error: Exception) -> Response:
        if request.scope["type"] == "websocket":
            raise error
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def raise_again(_: Request, error: Exception) -> Response:
        raise error

    # Starlette's outermost layer would answer unexpected exceptions before `ErrorResponses` receives them.
    app.add_exception_handler(Exception, raise_again)
    app.add_exception_handler(ClientGone, close)
    for kind in (UnisonoError, HTTPException, RequestValidationError, ValidationError):
        app.add_exception_handler(kind, answer)

    nowhere = app.router.default

    async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            raise NotFound(f"There is no WebSocket endpoint at {scope['path'][:200]}.")
        await nowhere(scope, receive, send)

    app.router.default = not_found


def _to_failure(error: Exception) -> UnisonoError:
    if isinstance(error, RequestValidationError):
        # The first step of the location is a part of the request, such as `query`, and not a field.
        return invalid([{**each, "loc": each["loc"][1:]} for each in error.errors()])
    return failure_of(error)
