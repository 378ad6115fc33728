"""Requests go directly to the gateway's own layers, except with an instrumentation."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.api.asgi import Exchange
from unisono.api.gateway_app import GatewayApp


class Outermost:
    """Layer that notes through which layer each request came."""

    def __init__(self, app: ASGIApp, callers: list[str]) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(scope["app"], GatewayApp)
        self._callers.append(scope.get("through", ""))
        await self._app(scope, receive, send)


def gateway(callers: list[str]) -> GatewayApp:
    app = GatewayApp(openapi_url=None, middleware=[Middleware(Outermost, callers=callers)])

    @app.get("/")
    async def root() -> dict[str, bool]:
        return {"done": True}

    return app


def observe(app: GatewayApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Surround all layers with a layer of another package, as instrumentations do."""
    build = app.build_middleware_stack

    def observed() -> ASGIApp:
        inner = build()

        async def layer(scope: Scope, receive: Receive, send: Send) -> None:
            await inner({**scope, "through": "instrumentation"}, receive, send)

        return layer

    monkeypatch.setattr(app, "build_middleware_stack", observed)


async def answered(app: GatewayApp) -> Any:
    return (await Exchange(app, "GET", "/").run()).json()


async def test_a_request_skips_the_layers_of_the_frameworks() -> None:
    callers: list[str] = []
    app = gateway(callers)
    assert await answered(app) == {"done": True}
    assert callers == [""]
    assert isinstance(app._entrance, Outermost)


async def test_a_layer_of_an_instrumentation_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    callers: list[str] = []
    app = gateway(callers)
    observe(app, monkeypatch)
    assert await answered(app) == {"done": True}
    assert callers == ["instrumentation"]


async def test_requests_pass_through_all_layers_if_telemetry_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    app = gateway([])
    monkeypatch.setattr(app._native_telemetry, "enabled", lambda: True)
    assert await answered(app) == {"done": True}
    assert not isinstance(app._entrance, Outermost)
