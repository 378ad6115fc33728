"""The Responses API in process for several tenants: each bearer key is the name of its tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode

from fastapi import FastAPI

from tests.api.asgi import Exchange, by_name, mount
from tests.api.responses.all_routes import RESPONSES_ROUTES
from unisono.api.asgi_layers import asgi_layers
from unisono.api.fastapi_app import register
from unisono.api.responses.background.lapsed_search import LapsedSearch
from unisono.api.responses.background.runner import BackgroundRunner
from unisono.api.responses.conversations.routes import CONVERSATIONS, ConversationDeps
from unisono.api.responses.routes.responses_api import ResponsesApi
from unisono.app import build
from unisono.bootstrap.engine import build_engine
from unisono.bootstrap.gateway import Gateway
from unisono.bootstrap.responses_api import responses_deps
from unisono.bootstrap.tool_servers import build_server_tools
from unisono.config import parse
from unisono.core.state_store import Store


class Mounted:
    def __init__(self, app: FastAPI, store: Store) -> None:
        self.app = app
        self.store = store

    async def ask(
        self,
        method: str,
        path: str,
        json: Any = None,
        *,
        as_: str = "ann",
        headers: Mapping[str, str] | None = None,
        **query: Any,
    ) -> Exchange:
        return await self.exchange(method, path, json, as_=as_, headers=headers, **query).run()

    def exchange(
        self,
        method: str,
        path: str,
        json: Any = None,
        *,
        as_: str = "ann",
        headers: Mapping[str, str] | None = None,
        **query: Any,
    ) -> Exchange:
        request_headers = [("authorization", f"Bearer {as_}"), *(headers or {}).items()]
        exchange = Exchange(self.app, method, path, json=json, headers=request_headers)
        exchange.scope["query_string"] = urlencode(query, doseq=True).encode()
        return exchange

    async def respond(self, *, as_: str = "ann", **fields: Any) -> dict[str, Any]:
        """Create a response and return its body."""
        response = await self.ask("POST", "/v1/responses", {"model": "gpt-oss", "input": "Hi", **fields}, as_=as_)
        assert response.status == 200, response.body
        return dict(response.json())


@asynccontextmanager
async def mounted(config: Mapping[str, Any], *, keep_alive_s: float = 10.0) -> AsyncIterator[Mounted]:
    """Serve the Responses API of this configuration with a test authenticator."""
    settings = parse({"store": {"url": "memory://"}, **config}, {}).config
    gateway: Gateway = build(settings).state.gateway
    hosting = build_server_tools(settings)
    deps = responses_deps(gateway, build_engine(gateway.pool, hosting.host), hosting.rules)
    runner = BackgroundRunner(deps, process="0")
    app = FastAPI(
        docs_url=None,
        openapi_url=None,
        redirect_slashes=False,
        middleware=asgi_layers(authenticate=by_name, keyless=False, new_id=lambda: "0"),
    )
    register(app)
    mount(app, CONVERSATIONS.routes, ConversationDeps(deps.store, deps.today, deps.new_id, deps.clock, deps.seals))
    mount(app, RESPONSES_ROUTES, ResponsesApi(deps, runner, keep_alive_s))
    gateway.pool.start()
    await gateway.upkeep.start()
    search = LapsedSearch(deps.store, deps.lease_s, runner.take_over_lapsed)
    search.start()
    try:
        yield Mounted(app, deps.store)
    finally:
        await search.aclose()
        await runner.aclose()
        await hosting.host.aclose()
        await gateway.pool.aclose()
        await gateway.upkeep.aclose()
