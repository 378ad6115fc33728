"""Routes of the gateway: aliases, HEAD, parameters, and the release of a replaced gateway."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from tests.api.asgi import Exchange
from unisono.app import build
from unisono.config import parse

KEY = "sk-the-only-key"
MODEL = {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/tiny", "api_base": "http://127.0.0.1:9"}}
CONFIG = {"model_list": [MODEL], "store": {"url": "memory://"}, "general_settings": {"master_key": KEY}}
HEADERS = [("authorization", f"Bearer {KEY}")]


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/health/readiness", "/"])
async def test_head_answers_like_get(path: str) -> None:
    app = build(parse(CONFIG, {}).config)
    head = await Exchange(app, "HEAD", path, headers=HEADERS).run()
    get = await Exchange(app, "GET", path, headers=HEADERS).run()
    assert head.status == get.status
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/v1/usage", "since=today", "since"),
        ("/v1/traces", "limit=0", "limit"),
        ("/v1/traces", "limit=%C2%B2", "limit"),
        ("/v1/responses/resp_1", "stream=1", "stream"),
        ("/v1/responses/resp_1/input_items", "limit=101", "limit"),
        ("/v1/conversations/conv_1/items", "include[]=all", "include"),
        ("/v1/conversations/conv_1/items", "include[]=all&include[]=none", "include"),
        ("/v1/conversations/conv_1/items", "order=up", "order"),
    ],
)
async def test_an_invalid_parameter_is_an_error_in_openais_format(path: str, query: str, param: str) -> None:
    exchange = Exchange(build(parse(CONFIG, {}).config), "GET", path, headers=HEADERS)
    exchange.scope["query_string"] = query.encode()
    response = await exchange.run()
    assert response.status == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")


async def test_routes_do_not_keep_a_replaced_gateway_in_memory() -> None:
    app = build(parse(CONFIG, {}).config)
    await Exchange(app, "GET", "/v1/models", headers=HEADERS).run()
    await Exchange(app, "GET", "/v1/responses/resp_1", headers=HEADERS).run()
    pool = weakref.ref(app.state.gateway.pool)
    del app
    # The threads that imported modules keep their last call for a moment.
    for _ in range(200):
        await asyncio.sleep(0.01)
        gc.collect()
        if pool() is None:
            break
    assert pool() is None
