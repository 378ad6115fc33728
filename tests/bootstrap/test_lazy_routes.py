"""APIs that are imported for their first request."""

from __future__ import annotations

from starlette.routing import WebSocketRoute

from unisono.api.layered_app import LayeredApp
from unisono.api.route_table import GatewayRoute
from unisono.app import build
from unisono.bootstrap.chat_api import DIRECT_ROUTES
from unisono.bootstrap.fastapi_routes import ROUTES
from unisono.config import parse

MODEL = {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/a", "api_base": "http://127.0.0.1:9"}}


def app() -> LayeredApp:
    return build(parse({"model_list": [MODEL], "store": {"url": "memory://"}}, {}).config)


def test_the_path_of_each_lazy_route_starts_with_a_declared_prefix() -> None:
    built = app()
    for lazy in built._lazy:
        for route in lazy.load(built.state):
            assert isinstance(route, GatewayRoute | WebSocketRoute)
            assert route.path.startswith(lazy.path_prefixes)


def test_every_route_without_fastapi_is_direct_or_lazy() -> None:
    built = app()
    known = [*DIRECT_ROUTES, *(route for lazy in built._lazy for route in lazy.load(built.state))]
    needing_none = [
        route for route in ROUTES if isinstance(route, WebSocketRoute) or getattr(route, "is_direct", False)
    ]
    assert len(needing_none) > 40
    assert [route for route in needing_none if route not in known] == []


def test_lazy_routes_share_the_runner_of_background_responses() -> None:
    built = app()
    before = built.state.gateway.background
    assert before.runner() is before.runner()
    [lazy] = [lazy for lazy in built._lazy if "/v1/responses" in lazy.path_prefixes]
    lazy.load(built.state)
    assert built.state.ResponsesApi.runner is before.runner()
