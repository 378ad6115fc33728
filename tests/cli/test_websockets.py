"""WebSockets through the real server and all ASGI layers."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib import import_module
from types import ModuleType
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
from unisono.api.fastapi_app import register
from unisono.app import build
from unisono.config import parse
from unisono.core.log_rate import RateLimitedWarning
from unisono.errors import InvalidRequest
from unisono.server import listener as http_listener
from unisono.server import websocket_connection
from unisono.server.server import server_config

KEY = "sk-right"
BEARER = {"authorization": f"Bearer {KEY}"}
MAX_BODY_BYTES = 100_000


def echo_app(key: str | None) -> FastAPI:
    """Return an app with all ASGI layers.

    `/echo` returns every message. `/fault/early` and `/refusal/early` fail before the WebSocket opens, and `later`
    fails after that.
    """
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
async def running_server(app: FastAPI, **settings: Any) -> AsyncIterator[int]:
    settings_by_section = {
        "unisono": {"max_body_bytes": MAX_BODY_BYTES, "header_timeout_s": 1, "shutdown_grace_s": 1, **settings}
    }
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(server_config(app, parse(settings_by_section, {}).config))
    serving = asyncio.create_task(server._serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        listener.close()


@asynccontextmanager
async def connected(port: int, path: str = "/echo", **options: Any) -> AsyncIterator[ClientConnection]:
    async with connect(f"ws://localhost:{port}{path}", host="127.0.0.1", proxy=None, **options) as client:
        yield client


async def refused_handshake(port: int, path: str = "/echo", **options: Any) -> tuple[int, Any]:
    """Return status and error of a refused handshake."""
    with pytest.raises(InvalidStatus) as refused:
        async with connected(port, path, **options):
            raise AssertionError("the WebSocket was opened")
    response = refused.value.response
    assert response.headers["x-request-id"].startswith("req_")
    return response.status_code, json.loads(response.body)["error"]


async def test_an_open_websocket_carries_messages_and_its_caller() -> None:
    async with running_server(echo_app(KEY)) as port, connected(port, additional_headers=BEARER) as client:
        hello = json.loads(await client.recv())
        assert client.response is not None
        assert client.response.headers["x-request-id"] == hello["id"]
        assert hello["tenant"]
        for text in ("", "Grüße 🌍", "x" * MAX_BODY_BYTES):
            await client.send(text)
            assert await client.recv() == text
        assert "sec-websocket-extensions" not in client.response.headers


INVALID_CREDENTIALS: dict[str, dict[str, str]] = {
    "no key": {},
    "wrong key": {"authorization": "Bearer sk-wrong"},
    "another scheme": {"authorization": f"Basic {KEY}"},
    "key in the subprotocol": {"sec-websocket-protocol": f"bearer, {KEY}"},
}


@pytest.mark.parametrize("headers", INVALID_CREDENTIALS.values(), ids=INVALID_CREDENTIALS)
@pytest.mark.parametrize("path", ["/echo", "/nowhere", "/v1/responses"])
async def test_a_websocket_without_a_valid_key_is_refused(headers: dict[str, str], path: str) -> None:
    async with running_server(echo_app(KEY)) as port:
        status, error = await refused_handshake(port, path, additional_headers=headers)
    assert (status, error["code"]) == (401, "invalid_api_key")


async def test_a_path_without_a_websocket_is_not_found() -> None:
    async with running_server(echo_app(KEY)) as port:
        for path in ("/nowhere", "/plain", "/echo/"):
            status, error = await refused_handshake(port, path, additional_headers=BEARER)
            assert (status, error["code"]) == (404, "not_found")
            assert path in error["message"]


ORIGINS: dict[str, tuple[str | None, bool]] = {
    "no origin": (None, True),
    "own origin": ("http://localhost:{port}", True),
    "another local port": ("http://localhost:3000", False),
    "listed origin": ("https://listed.example", True),
    "foreign origin": ("https://evil.example", False),
    "null origin": ("null", False),
    "host name with an allowed prefix": ("http://localhost.evil.example", False),
}


@pytest.mark.parametrize(("origin", "allowed"), ORIGINS.values(), ids=ORIGINS)
async def test_a_keyless_gateway_accepts_only_its_own_and_listed_origins(origin: str | None, allowed: bool) -> None:
    async with running_server(echo_app(None)) as port:
        origin = origin and origin.format(port=port)
        if allowed:
            async with connected(port, origin=origin) as client:
                assert json.loads(await client.recv())["id"]
        else:
            status, error = await refused_handshake(port, origin=origin)
            assert (status, error["code"]) == (403, "permission_denied")


async def test_a_keyless_gateway_refuses_other_host_names() -> None:
    async with running_server(echo_app(None)) as port:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(f"ws://evil.example:{port}/echo", host="127.0.0.1", port=port, proxy=None):
                raise AssertionError("the WebSocket was opened")
    assert refused.value.response.status_code == 403


FAULTS: dict[str, tuple[str, int, int, str]] = {
    "invalid request": ("refusal", 400, 1008, "invalid_value"),
    "internal error": ("fault", 500, 1011, "internal_error"),
}


@pytest.mark.parametrize(("kind", "status", "closed", "code"), FAULTS.values(), ids=FAULTS)
async def test_errors_are_responses_before_opening_and_close_reasons_after_it(
    kind: str, status: int, closed: int, code: str
) -> None:
    async with running_server(echo_app(None)) as port:
        received_status, error = await refused_handshake(port, f"/{kind}/early")
        assert (received_status, error["code"]) == (status, code)
        assert "planted" not in error["message"]
        async with connected(port, f"/{kind}/later") as client:
            with pytest.raises(ConnectionClosedError) as ended:
                await client.recv()
            assert ended.value.rcvd is not None
            assert (ended.value.rcvd.code, ended.value.rcvd.reason) == (closed, code)


async def test_a_client_disconnect_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with running_server(echo_app(None)) as port:
        async with connected(port) as client:
            await client.recv()
        async with connected(port) as client:
            client.transport.abort()
        await asyncio.sleep(0.1)
    assert [record.getMessage() for record in caplog.records if record.levelname in {"ERROR", "CRITICAL"}] == []


@pytest.mark.parametrize("pieces", [1, 50], ids=["at once", "in fragments"])
async def test_a_too_large_message_closes_the_websocket(pieces: int) -> None:
    async with running_server(echo_app(None)) as port, connected(port) as client:
        await client.recv()
        size = MAX_BODY_BYTES // pieces + 1
        # Data beyond the limit may fail to send.
        with suppress(ConnectionClosedError):
            await client.send(["x" * size] * pieces if pieces > 1 else "x" * size)
        with pytest.raises(ConnectionClosedError) as ended:
            await client.recv()
        assert ended.value.rcvd is not None
        assert ended.value.rcvd.code == 1009


async def test_server_shutdown_closes_the_websocket() -> None:
    async with running_server(echo_app(None)) as port:
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
HANDSHAKES: dict[str, tuple[str, str, str]] = {
    "well-formed": ("/echo", "", "101"),
    "absolute target": ("http://localhost/echo", "", "404"),
    "non-ASCII target": ("/ech\xf6", "", "400"),
    "too many headers": ("/echo", "".join(f"x-{i}: y\r\n" for i in range(200)), "431"),
    "too long a header": ("/echo", f"x-long: {'y' * 10_000}\r\n", "431"),
    "invalid key": ("/echo", "sec-websocket-key: other\r\n", "400"),
    "wrong upgrade header": ("/echo", "upgrade: other\r\n", "404"),
    "body": ("/echo", "content-length: 5\r\n", "400"),
    "chunked body": ("/echo", "transfer-encoding: chunked\r\n", "400"),
    "empty body": ("/echo", "content-length: 0\r\n", "101"),
}


async def first_line(port: int, request: bytes) -> bytes:
    """Send a request and return the first line of the response within 5 seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        async with asyncio.timeout(5):
            return await reader.readline()
    finally:
        writer.close()


@pytest.mark.parametrize(("path", "more", "status"), HANDSHAKES.values(), ids=HANDSHAKES)
async def test_an_unusual_handshake_gets_the_expected_status(path: str, more: str, status: str) -> None:
    async with running_server(echo_app(None)) as port:
        status_line = await first_line(port, HANDSHAKE.format(path=path, more=more).encode("latin-1"))
    assert status_line.split()[1:2] == [status.encode()]


REQUEST_LINES: dict[str, tuple[str, str]] = {
    "non-ASCII target": ("GET /ech\xf6 HTTP/1.1", "The request is not valid HTTP."),
    "another method": ("POST /echo HTTP/1.1", "A WebSocket must start with a GET request over HTTP/1.1."),
    "another version": ("GET /echo HTTP/1.0", "A WebSocket must start with a GET request over HTTP/1.1."),
}


@pytest.mark.parametrize(("line", "message"), REQUEST_LINES.values(), ids=REQUEST_LINES)
async def test_a_refused_handshake_states_what_is_wrong_with_its_request_line(line: str, message: str) -> None:
    request = HANDSHAKE.format(path="/echo", more="").replace("GET /echo HTTP/1.1", line)
    async with running_server(echo_app(None)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request.encode("latin-1"))
        async with asyncio.timeout(5):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    error = json.loads(body)["error"]
    assert (head.split()[1], error["code"], error["message"]) == (b"400", "malformed_request", message)


@pytest.mark.slow
async def test_the_header_deadline_applies_to_handshakes_only() -> None:
    request = HANDSHAKE.format(path="/echo", more="").encode()
    async with running_server(echo_app(None)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request[:60])
        await asyncio.sleep(0.2)
        writer.write(request[60:])
        async with asyncio.timeout(5):
            assert (await reader.readline()).split()[1] == b"101"
            await reader.readuntil(b"\r\n\r\n")
            await reader.read(1)
            # The header deadline does not apply to an open WebSocket.
            await asyncio.sleep(1.3)
        assert not reader.at_eof()
        writer.close()
        assert (await first_line(port, request[:60])).split()[1] == b"408"


async def test_open_websockets_count_as_connections() -> None:
    async with running_server(echo_app(None), max_connections=2) as port, connected(port), connected(port):
        with pytest.raises(InvalidStatus) as refused:
            async with connected(port):
                raise AssertionError("the WebSocket was opened")
        assert refused.value.response.status_code == 503


@pytest.mark.parametrize("limit", [1, 3])
async def test_as_many_connections_are_served_as_configured(limit: int) -> None:
    async with (
        running_server(echo_app(None), max_connections=limit) as port,
        asyncio.timeout(5),
        AsyncExitStack() as ends,
    ):

        async def connection() -> Callable[[], Awaitable[int]]:
            """Return a function that sends a request on a new connection and returns the status."""
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            ends.callback(writer.close)

            async def status() -> int:
                writer.write(b"GET /plain HTTP/1.1\r\nhost: localhost\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
                return int(head.split()[1])

            return status

        served = [await connection() for _ in range(limit)]
        assert [await status() for status in served] == [200] * limit
        further = await connection()
        # The idle further connection does not affect the others.
        assert [await status() for status in served] == [200] * limit
        assert await further() == 503
        assert [await status() for status in served] == [200] * limit


async def test_a_websocket_opens_on_a_connection_that_served_requests() -> None:
    async with running_server(echo_app(None)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(5):
            writer.write(b"GET /plain HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b'"plain"')
            writer.write(HANDSHAKE.format(path="/echo", more="").encode())
            assert (await reader.readline()).split()[1] == b"101"
        writer.close()


async def test_a_websocket_does_not_open_during_another_response() -> None:
    async with running_server(echo_app(None)) as port:
        request = b"POST /plain HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
        handshake = HANDSHAKE.format(path="/echo", more="").encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request + handshake)
        async with asyncio.timeout(5):
            response = await reader.read()
        assert b"101 Switching" not in response
        writer.close()


async def test_the_gateway_answers_404_for_unknown_websocket_paths() -> None:
    async with FakeVllm() as fake:
        params = {"model": "vllm/tiny", "api_base": fake.url}
        models = [{"model_name": "gpt-oss", "litellm_params": params}]
        raw_config = {"model_list": models, "store": {"url": "memory://"}}
        async with running_server(build(parse(raw_config, {}).config)) as port:
            status, error = await refused_handshake(port, "/v1/nowhere")
    assert (status, error["code"]) == (404, "not_found")


async def test_the_first_websocket_imports_its_library_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    importers: list[threading.Thread] = []

    def recorded(name: str) -> ModuleType:
        importers.append(threading.current_thread())
        return import_module(name)

    monkeypatch.setattr(http_listener, "import_module", recorded)
    monkeypatch.delitem(sys.modules, websocket_connection.__name__)
    async with running_server(echo_app(None)) as port:
        for _ in range(2):
            async with connected(port) as client:
                await client.recv()
                await client.send("Hi")
                assert await client.recv() == "Hi"
    assert len(importers) == 1
    assert importers[0] is not threading.current_thread()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("fragment", [b"", b"ab"], ids=["empty", "small"])
async def test_a_message_has_a_limited_number_of_fragments(fragment: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    # The limit for the frames of one read is lower.
    monkeypatch.setattr(websocket_connection, "MAX_FRAMES_PER_READ", 1 << 20)
    async with running_server(echo_app(None)) as port, connected(port) as client:
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


FLOODS = {
    "pings": b"\x89\x81\0\0\0\0x",
    "long pings": b"\x89\xfd\0\0\0\0" + b"x" * 125,
    "pongs": b"\x8a\x80\0\0\0\0",
    "messages": b"\x81\x81\0\0\0\0x",
}


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_of_frames_closes_the_connection(name: str) -> None:
    async with running_server(echo_app(None)) as port, connected(port) as client:
        await client.recv()
        client.transport.write(FLOODS[name] * 20_000)
        async with asyncio.timeout(10):
            await client.wait_closed()
        assert client.close_code in (1006, 1008)


async def test_some_pings_at_once_are_answered() -> None:
    async with running_server(echo_app(None)) as port, connected(port) as client:
        await client.recv()
        pongs = [await client.ping() for _ in range(50)]
        async with asyncio.timeout(10):
            await asyncio.gather(*pongs)


async def test_invalid_utf8_text_is_logged_once_without_a_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        websocket_connection,
        "MALFORMED_TEXT",
        RateLimitedWarning(logging.getLogger("unisono.server.websocket_connection")),
    )
    async with running_server(echo_app(None)) as port:
        for pieces in ([b"\xff\xfe"], [b"ab", b"\xc3"], [b"\x80"]):
            async with connected(port) as client:
                await client.recv()
                await client.send(pieces, text=True)
                with pytest.raises(ConnectionClosedError) as closed:
                    await client.recv()
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1007
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in records] == ["unisono.server.websocket_connection"]
    assert records[0].exc_info is None
