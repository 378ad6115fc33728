"""WebSockets through the real server and every door: who opens one, how others are refused, what an open one bears."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedError, ConnectionClosedOK, InvalidStatus

from tests.fakes import FakeVllm
from unisono.access.keys import MasterKey, NoKeys
from unisono.api.asgi_layers import asgi_layers
from unisono.api.error_responses import register
from unisono.app import build
from unisono.config import parse
from unisono.core.log_rate import RateLimitedWarning
from unisono.errors import InvalidRequest
from unisono.server import websocket_connection
from unisono.server.server import server_config

KEY = "sk-right"
BEARER = {"authorization": f"Bearer {KEY}"}
LARGEST = 100_000


def echoing(key: str | None) -> FastAPI:
    """Behind every door: `/echo` says back what it hears, `/fault` breaks, `/refusal` refuses, before or after it is
    open."""
    ids = iter(range(1000))
    app = FastAPI(
        openapi_url=None,
        redirect_slashes=False,
        middleware=asgi_layers(
            authenticate=NoKeys().identify if key is None else MasterKey(key).identify,
            keyless=key is None,
            new_id=lambda: f"{next(ids)}",
            origins=["https://listed.example"],
        ),
    )
    register(app)

    @app.websocket("/echo")
    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_json({"tenant": socket.state.caller.tenant, "id": socket.state.request_id})
        while True:
            await socket.send_text(await socket.receive_text())

    @app.websocket("/{kind}/{when}")
    async def fails(socket: WebSocket, kind: str, when: str) -> None:
        if when == "later":
            await socket.accept()
        if kind == "fault":
            raise RuntimeError("planted fault")
        raise InvalidRequest("Not like this.", param="model")

    @app.get("/plain")
    async def plain() -> str:
        return "plain"

    return app


@asynccontextmanager
async def listening(app: FastAPI, **settings: Any) -> AsyncIterator[int]:
    raw = {"unisono": {"max_body_bytes": LARGEST, "header_timeout_s": 1, "shutdown_grace_s": 1, **settings}}
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(server_config(app, parse(raw, {}).config))
    serving = asyncio.create_task(server._serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        listener.close()


@asynccontextmanager
async def opened(port: int, path: str = "/echo", **options: Any) -> AsyncIterator[ClientConnection]:
    async with connect(f"ws://localhost:{port}{path}", host="127.0.0.1", proxy=None, **options) as client:
        yield client


async def refusal(port: int, path: str = "/echo", **options: Any) -> tuple[int, Any]:
    """Status and error of a handshake."""
    with pytest.raises(InvalidStatus) as refused:
        async with opened(port, path, **options):
            raise AssertionError("it was opened")
    response = refused.value.response
    assert response.headers["x-request-id"].startswith("req_")
    return response.status_code, json.loads(response.body)["error"]


async def test_an_open_one_carries_messages_both_ways_and_knows_its_caller() -> None:
    async with listening(echoing(KEY)) as port, opened(port, additional_headers=BEARER) as client:
        hello = json.loads(await client.recv())
        assert client.response is not None
        assert client.response.headers["x-request-id"] == hello["id"]
        assert hello["tenant"]
        for said in ("", "Grüße 🌍", "x" * LARGEST):
            await client.send(said)
            assert await client.recv() == said
        assert "sec-websocket-extensions" not in client.response.headers


STRANGERS: dict[str, dict[str, str]] = {
    "no key": {},
    "a wrong key": {"authorization": "Bearer sk-wrong"},
    "another scheme": {"authorization": f"Basic {KEY}"},
    "a key in the protocol": {"sec-websocket-protocol": f"bearer, {KEY}"},
}


@pytest.mark.parametrize("headers", STRANGERS.values(), ids=STRANGERS)
@pytest.mark.parametrize("path", ["/echo", "/nowhere", "/v1/responses"])
async def test_without_the_key_none_is_opened(headers: dict[str, str], path: str) -> None:
    async with listening(echoing(KEY)) as port:
        status, error = await refusal(port, path, additional_headers=headers)
    assert (status, error["code"]) == (401, "invalid_api_key")


async def test_a_path_without_one_is_not_found() -> None:
    async with listening(echoing(KEY)) as port:
        for path in ("/nowhere", "/plain", "/echo/"):
            status, error = await refusal(port, path, additional_headers=BEARER)
            assert (status, error["code"]) == (404, "not_found")
            assert path in error["message"]


PAGES: dict[str, tuple[str | None, bool]] = {
    "no page": (None, True),
    "the gateway's own page": ("http://localhost:{port}", True),
    "a page at another port of this machine": ("http://localhost:3000", False),
    "a listed page": ("https://listed.example", True),
    "a foreign page": ("https://evil.example", False),
    "a file": ("null", False),
    "a name that begins alike": ("http://localhost.evil.example", False),
}


@pytest.mark.parametrize(("origin", "allowed"), PAGES.values(), ids=PAGES)
async def test_without_keys_no_foreign_page_opens_one(origin: str | None, allowed: bool) -> None:
    async with listening(echoing(None)) as port:
        origin = origin and origin.format(port=port)
        if allowed:
            async with opened(port, origin=origin) as client:
                assert json.loads(await client.recv())["id"]
        else:
            status, error = await refusal(port, origin=origin)
            assert (status, error["code"]) == (403, "permission_denied")


async def test_without_keys_no_name_that_points_here_opens_one() -> None:
    async with listening(echoing(None)) as port:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(f"ws://evil.example:{port}/echo", host="127.0.0.1", port=port, proxy=None):
                raise AssertionError("it was opened")
    assert refused.value.response.status_code == 403


FAULTS: dict[str, tuple[str, int, int, str]] = {
    "a refusal": ("refusal", 400, 1008, "invalid_value"),
    "a fault": ("fault", 500, 1011, "internal_error"),
}


@pytest.mark.parametrize(("kind", "status", "closed", "code"), FAULTS.values(), ids=FAULTS)
async def test_what_goes_wrong_is_answered_before_it_is_open_and_a_reason_to_close_afterwards(
    kind: str, status: int, closed: int, code: str
) -> None:
    async with listening(echoing(None)) as port:
        told, error = await refusal(port, f"/{kind}/early")
        assert (told, error["code"]) == (status, code)
        assert "planted" not in error["message"]
        async with opened(port, f"/{kind}/later") as client:
            with pytest.raises(ConnectionClosedError) as ended:
                await client.recv()
            assert ended.value.rcvd is not None
            assert (ended.value.rcvd.code, ended.value.rcvd.reason) == (closed, code)


async def test_a_client_that_leaves_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with listening(echoing(None)) as port:
        async with opened(port) as client:
            await client.recv()
        async with opened(port) as client:
            client.transport.abort()
        await asyncio.sleep(0.1)
    assert [record.getMessage() for record in caplog.records if record.levelname in {"ERROR", "CRITICAL"}] == []


@pytest.mark.parametrize("pieces", [1, 50], ids=["at once", "in fragments"])
async def test_a_message_larger_than_a_body_may_be_closes_it(pieces: int) -> None:
    async with listening(echoing(None)) as port, opened(port) as client:
        await client.recv()
        size = LARGEST // pieces + 1
        # What is sent after the server has had enough may or may not get out.
        with suppress(ConnectionClosedError):
            await client.send(["x" * size] * pieces if pieces > 1 else "x" * size)
        with pytest.raises(ConnectionClosedError) as ended:
            await client.recv()
        assert ended.value.rcvd is not None
        assert ended.value.rcvd.code == 1009


async def test_the_end_of_the_server_closes_it() -> None:
    async with listening(echoing(None)) as port:
        client = await connect(f"ws://localhost:{port}/echo", host="127.0.0.1", proxy=None)
        await client.recv()
    with pytest.raises((ConnectionClosedError, ConnectionClosedOK)) as ended:
        await client.recv()
    assert ended.value.rcvd is not None
    assert ended.value.rcvd.code == 1012


HANDSHAKE = (
    "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n{more}\r\n"
)
ODD: dict[str, tuple[str, str, str]] = {
    "well-formed": ("/echo", "", "101"),
    "a target with its host": ("http://localhost/echo", "", "404"),
    "a target that is no ASCII": ("/ech\xf6", "", "400"),
    "too many headers": ("/echo", "".join(f"x-{i}: y\r\n" for i in range(200)), "431"),
    "too long a header": ("/echo", f"x-long: {'y' * 10_000}\r\n", "431"),
    "a key that is none": ("/echo", "sec-websocket-key: other\r\n", "400"),
    "one without its upgrade": ("/echo", "upgrade: other\r\n", "404"),
}


async def raw(port: int, request: bytes) -> bytes:
    """The first line that comes back, and at least that within the time a handshake has."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        async with asyncio.timeout(5):
            return await reader.readline()
    finally:
        writer.close()


@pytest.mark.parametrize(("path", "more", "status"), ODD.values(), ids=ODD)
async def test_a_handshake_however_odd_is_answered(path: str, more: str, status: str) -> None:
    async with listening(echoing(None)) as port:
        said = await raw(port, HANDSHAKE.format(path=path, more=more).encode("latin-1"))
    assert said.split()[1:2] == [status.encode()]


@pytest.mark.slow
async def test_a_handshake_in_pieces_has_the_time_of_headers_and_no_more() -> None:
    request = HANDSHAKE.format(path="/echo", more="").encode()
    async with listening(echoing(None)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request[:60])
        await asyncio.sleep(0.2)
        writer.write(request[60:])
        async with asyncio.timeout(5):
            assert (await reader.readline()).split()[1] == b"101"
            await reader.readuntil(b"\r\n\r\n")
            await reader.read(1)
            # Once it is open, the time for headers is over and means nothing any more.
            await asyncio.sleep(1.3)
        assert not reader.at_eof()
        writer.close()
        assert (await raw(port, request[:60])).split()[1] == b"408"


async def test_open_ones_count_as_connections() -> None:
    async with listening(echoing(None), max_connections=3) as port, opened(port), opened(port):
        with pytest.raises(InvalidStatus) as refused:
            async with opened(port):
                raise AssertionError("it was opened")
        assert refused.value.response.status_code == 503


async def test_one_on_a_connection_that_has_served_requests_is_opened() -> None:
    async with listening(echoing(None)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(5):
            writer.write(b"GET /plain HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b'"plain"')
            writer.write(HANDSHAKE.format(path="/echo", more="").encode())
            assert (await reader.readline()).split()[1] == b"101"
        writer.close()


async def test_one_in_the_middle_of_another_answer_is_not_opened() -> None:
    async with listening(echoing(None)) as port:
        request = b"POST /plain HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
        handshake = HANDSHAKE.format(path="/echo", more="").encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request + handshake)
        async with asyncio.timeout(5):
            said = await reader.read()
        assert b"101 Switching" not in said
        writer.close()


async def test_the_gateway_itself_has_no_websocket_where_there_is_none() -> None:
    async with FakeVllm() as fake:
        params = {"model": "vllm/tiny", "api_base": fake.url}
        models = [{"model_name": "gpt-oss", "litellm_params": params}]
        raw_config = {"model_list": models, "store": {"url": "memory://"}}
        async with listening(build(parse(raw_config, {}).config)) as port:
            status, error = await refusal(port, "/v1/nowhere")
    assert (status, error["code"]) == (404, "not_found")


@pytest.mark.parametrize("fragment", [b"", b"ab"], ids=["empty", "small"])
async def test_a_message_has_a_limited_number_of_fragments(fragment: bytes) -> None:
    async with listening(echoing(None)) as port, opened(port) as client:
        await client.recv()
        # The client ends a message with an empty fragment.
        length = websocket_connection.MAX_FRAGMENTS - 1
        await client.send([b"a"] * length, text=True)
        assert await client.recv() == "a" * length
        with suppress(ConnectionClosedError):
            await client.send([b"a", *[fragment] * websocket_connection.MAX_FRAGMENTS, b"a"], text=True)
        with pytest.raises(ConnectionClosedError) as closed:
            async with asyncio.timeout(10):
                await client.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


async def test_text_that_is_not_utf8_is_logged_without_a_traceback_and_rarely(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        websocket_connection,
        "MALFORMED_TEXT",
        RateLimitedWarning(logging.getLogger("unisono.server.websocket_connection")),
    )
    async with listening(echoing(None)) as port:
        for pieces in ([b"\xff\xfe"], [b"ab", b"\xc3"], [b"\x80"]):
            async with opened(port) as client:
                await client.recv()
                await client.send(pieces, text=True)
                with pytest.raises(ConnectionClosedError) as closed:
                    await client.recv()
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1007
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in records] == ["unisono.server.websocket_connection"]
    assert records[0].exc_info is None
