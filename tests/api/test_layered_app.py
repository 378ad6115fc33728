"""Application behind layers: unexpected exceptions, and requests that never reach FastAPI."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from tests.api.asgi import Exchange
from unisono.access.keys import NoKeys
from unisono.api.asgi_layers import asgi_layers
from unisono.api.error_responses import register
from unisono.api.layered_app import LayeredApp
from unisono.api.route_table import DirectRoutes, GatewayRoute, mount


async def direct(request: Request) -> Response:
    assert isinstance(request.app, FastAPI)
    return Response(request.scope["state"]["request_id"])


async def broken(request: Request) -> Response:
    raise RuntimeError("planted fault")


ROUTES = (
    GatewayRoute("/direct", direct, methods=["POST"], direct=True),
    GatewayRoute("/direct/broken", broken, methods=["POST"], direct=True),
    GatewayRoute("/broken", broken, methods=["POST"]),
)


def layered() -> LayeredApp:
    layers = asgi_layers(authenticate=NoKeys().identify, keyless=True, new_id=lambda: "0")
    app = LayeredApp(layers=[*layers, Middleware(DirectRoutes, routes=ROUTES)], openapi_url=None)
    register(app)
    mount(app, ROUTES)
    return app


async def test_a_direct_route_is_answered_without_fastapi() -> None:
    app = layered()
    response = await Exchange(app, "POST", "/direct", json={}).run()
    assert response.body == b"req_0"
    assert response.headers["x-request-id"] == "req_0"
    # FastAPI builds its stack for the first request that it receives.
    assert app.middleware_stack is None


@pytest.mark.parametrize("path", ["/direct/broken", "/broken"])
async def test_an_unexpected_exception_is_logged_once_and_answered_as_json(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    response = await Exchange(layered(), "POST", path, json={}).run()
    assert response.status == 500
    assert response.headers["x-request-id"] == "req_0"
    assert response.json()["error"]["type"] == "server_error"
    assert [record.getMessage() for record in caplog.records] == ["unexpected exception: RuntimeError"]
