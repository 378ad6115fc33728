"""Application behind layers: direct routes, FastAPI for all others, and unexpected exceptions."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import Message
from starlette.websockets import WebSocket

from tests.api.asgi import Exchange
from unisono.access.keys import MasterKey, NoKeys
from unisono.api.asgi_layers import asgi_layers
from unisono.api.fastapi_app import fastapi_app
from unisono.api.layered_app import LayeredApp, LazyRoutes
from unisono.api.route_table import GatewayRoute
from unisono.core.request_record import RequestRecord


async def direct(request: Request) -> Response:
    assert isinstance(request.app, LayeredApp)
    return Response(request.scope["state"]["request_id"])


async def described(request: Request) -> Response:
    assert isinstance(request.app, FastAPI)
    return Response(request.app.state.shared)


async def broken(request: Request) -> Response:
    raise RuntimeError("planted fault")


async def socket(websocket: WebSocket) -> None:
    if websocket.query_params:
        raise RuntimeError("planted fault")
    await websocket.accept()
    await websocket.send_text(websocket.scope["state"]["request_id"])
    await websocket.close()


DIRECT = (
    GatewayRoute("/direct", direct, methods=["POST"], direct=True),
    WebSocketRoute("/socket", socket),
    GatewayRoute("/direct/broken", broken, methods=["POST"], direct=True),
)
OTHERS = (
    GatewayRoute("/described/{name}", described, methods=["GET"]),
    GatewayRoute("/broken", broken, methods=["POST"]),
)
LAZY = (GatewayRoute("/lazy/one", direct, methods=["POST"], direct=True), WebSocketRoute("/lazy/socket", socket))
# States for which FastAPI was built.
BUILT: list[State] = []
# Path prefixes of the lazy routes that were loaded.
LOADED: list[str] = []


@asynccontextmanager
async def no_lifespan() -> AsyncIterator[None]:
    yield


def build_fastapi(state: State) -> FastAPI:
    BUILT.append(state)
    state.shared = "from the state"
    return fastapi_app([*DIRECT, *LAZY, *OTHERS], state)


@pytest.fixture(autouse=True)
def nothing_built() -> None:
    BUILT.clear()
    LOADED.clear()


def lazy(prefix: str, routes: tuple[BaseRoute, ...] = ()) -> LazyRoutes:
    def load(state: State) -> tuple[BaseRoute, ...]:
        time.sleep(0.01)
        LOADED.append(prefix)
        return routes

    return LazyRoutes((prefix,), load)


def layered(key: str | None = None, records: list[RequestRecord] | None = None) -> LayeredApp:
    keys = NoKeys() if key is None else MasterKey(key)
    layers = asgi_layers(
        authenticate=keys.identify,
        keyless=key is None,
        new_id=lambda: "0",
        sinks=[] if records is None else [records.append],
    )
    return LayeredApp(
        layers=layers,
        routes=DIRECT,
        lazy=[lazy("/lazy", LAZY), lazy("/other")],
        build_fastapi=build_fastapi,
        lifespan=no_lifespan,
    )


async def test_a_direct_route_is_answered_without_fastapi() -> None:
    response = await Exchange(layered(), "POST", "/direct", json={}).run()
    assert response.body == b"req_0"
    assert response.headers["x-request-id"] == "req_0"
    assert (BUILT, LOADED) == ([], [])


async def test_lazy_routes_are_loaded_once_for_their_first_requests_and_need_no_fastapi() -> None:
    app = layered()
    answers = await asyncio.gather(*(Exchange(app, "POST", "/lazy/one", json={}).run() for _ in range(5)))
    assert [answer.body for answer in answers] == [b"req_0"] * 5
    accepted, *_ = await websocket_messages(app, "/lazy/socket")
    assert accepted["type"] == "websocket.accept"
    assert (BUILT, LOADED) == ([], ["/lazy"])


async def test_fastapi_is_built_after_all_lazy_routes_are_loaded() -> None:
    app = layered()
    assert (await Exchange(app, "GET", "/lazy/one").run()).status == 405
    assert (["/lazy", "/other"], [app.state]) == (LOADED, BUILT)
    assert (await Exchange(app, "POST", "/lazy/one", json={}).run()).body == b"req_0"
    assert LOADED == ["/lazy", "/other"]


async def test_the_record_of_a_refused_request_names_its_lazy_route() -> None:
    records: list[RequestRecord] = []
    assert (await Exchange(layered("sk-right", records), "POST", "/lazy/one").run()).status == 401
    assert [record.route for record in records] == ["/lazy/one"]
    assert BUILT == []


async def websocket_messages(app: LayeredApp, path: str, query: bytes = b"") -> list[Message]:
    """Open a WebSocket and return the messages of the application."""
    scope = {**Exchange(app, "GET", path).scope, "type": "websocket", "query_string": query, "subprotocols": []}
    del scope["method"]
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


async def test_a_websocket_is_answered_without_fastapi() -> None:
    accepted, text, closed = await websocket_messages(layered(), "/socket")
    assert (accepted["type"], text["text"], closed["type"]) == ("websocket.accept", "req_0", "websocket.close")
    [refused] = await websocket_messages(layered(), "/socket", b"fault=1")
    assert refused["reason"] == "internal_error"
    assert BUILT == []


async def test_an_unknown_websocket_is_refused_by_fastapi() -> None:
    [closed] = await websocket_messages(layered(), "/nowhere")
    assert (closed["type"], closed["reason"]) == ("websocket.close", "not_found")


@pytest.mark.parametrize("method", ["", "WEBSOCKET", "GET"])
async def test_a_request_cannot_call_the_endpoint_of_a_websocket(method: str) -> None:
    assert (await Exchange(layered(), method, "/socket").run()).status in {404, 405}


async def test_fastapi_is_built_once_for_concurrent_requests_to_other_routes() -> None:
    app = layered()
    answers = await asyncio.gather(*(Exchange(app, "GET", "/described/one").run() for _ in range(5)))
    assert [answer.body for answer in answers] == [b"from the state"] * 5
    assert [app.state] == BUILT
    assert (await Exchange(app, "POST", "/direct", json={}).run()).body == b"req_0"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/direct", 405)])
async def test_a_request_without_a_route_gets_fastapis_error(method: str, path: str, status: int) -> None:
    response = await Exchange(layered(), method, path).run()
    assert response.status == status
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_the_record_of_a_refused_request_names_its_route() -> None:
    records: list[RequestRecord] = []
    app = layered("sk-right", records)
    for method, path in (("GET", "/described/one"), ("POST", "/direct")):
        assert (await Exchange(app, method, path).run()).status == 401
    assert [record.route for record in records] == ["/described/{name}", "/direct"]


async def test_the_record_of_a_refused_direct_request_needs_no_fastapi() -> None:
    records: list[RequestRecord] = []
    assert (await Exchange(layered("sk-right", records), "POST", "/direct").run()).status == 401
    assert [record.route for record in records] == ["/direct"]
    assert BUILT == []


@pytest.mark.parametrize("path", ["/direct/broken", "/broken"])
async def test_an_unexpected_exception_is_logged_once_and_answered_as_json(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    response = await Exchange(layered(), "POST", path, json={}).run()
    assert response.status == 500
    assert response.headers["x-request-id"] == "req_0"
    assert response.json()["error"]["type"] == "server_error"
    assert [record.getMessage() for record in caplog.records] == ["unexpected exception: RuntimeError"]


def test_a_start_imports_neither_fastapi_nor_the_modules_of_lazy_routes() -> None:
    code = """
import sys
import unisono.cli.serve, unisono_adapters.vllm
api = ("admin", "openapi", "model_facts", "completions", "embeddings_and_media", "responses.routes", "messages.routes")
names = ("fastapi", "unisono.web.routes", *(f"unisono.api.{name}" for name in api))
print([name for name in sys.modules if name.startswith(names)])
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("lost", ["http.response.start", "http.response.body"])
@pytest.mark.parametrize(("method", "path"), [("POST", "/direct"), ("GET", "/described/one")])
async def test_a_client_that_is_gone_at_a_write_is_no_fault_of_the_gateway(
    method: str, path: str, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    exchange = Exchange(layered(), method, path)
    sent: list[str] = []

    async def send(message: Message) -> None:
        sent.append(message["type"])
        if message["type"] == lost:
            raise OSError("the client is gone")

    exchange._send = send  # type: ignore[method-assign]
    await exchange.run()
    assert sent[-1] == lost
    assert sent.count(lost) == 1
    assert caplog.text == ""
