"""Limits of the ASGI layers: body size, body time, authentication, hosts and origins."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from tests.api.asgi import Exchange
from unisono.access.keys import MasterKey, NoKeys
from unisono.api.allowed_clients import is_local_host_header
from unisono.api.answer_report import limit_headers
from unisono.api.asgi_layers import HEALTH_PATHS, asgi_layers
from unisono.api.authentication import Authenticate
from unisono.api.body import read_json
from unisono.api.body_limits import ARRIVED_BYTES
from unisono.api.cors import EXPOSED
from unisono.api.disconnects import until_disconnect
from unisono.api.fastapi_app import register
from unisono.api.openapi import HEADERS
from unisono.core.access import Caller
from unisono.core.quotas import KeyLimits, QuotaStatus
from unisono.errors import NotAuthenticated

KEY = "sk-right"
BEARER = ("authorization", f"Bearer {KEY}")


def gateway(*, authenticate: Authenticate | None = None, origins: Iterable[str] = (), **limits: Any) -> FastAPI:
    """Return an app with all ASGI layers. Without `authenticate` it has no keys."""
    ids = iter(range(1000))
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        middleware=asgi_layers(
            authenticate=authenticate or NoKeys().identify,
            keyless=authenticate is None,
            new_id=lambda: f"{next(ids)}",
            origins=origins,
            **limits,
        ),
    )
    register(app)

    @app.post("/v1/echo")
    async def echo(request: Request) -> dict[str, Any]:
        return {"tenant": request.state.caller.tenant, "body": await read_json(request)}

    @app.post("/v1/cancel")
    async def cancel(request: Request) -> dict[str, Any]:
        return {"done": True}

    @app.post("/v1/slow")
    async def slow(request: Request) -> dict[str, Any]:
        await read_json(request)
        await until_disconnect(request, asyncio.sleep(0.15))
        return {"done": True}

    @app.post("/v1/named")
    async def named() -> Response:
        return Response(b"{}", headers={"X-Request-Id": "mine", "x-more": "1"})

    @app.get("/health/liveliness")
    async def alive() -> dict[str, Any]:
        return {"status": "alive"}

    return app


def keyed_gateway(**more: Any) -> FastAPI:
    return gateway(authenticate=MasterKey(KEY).identify, **more)


async def post(app: FastAPI, *headers: tuple[str, str], path: str = "/v1/echo") -> Exchange:
    return await Exchange(app, "POST", path, json={"a": 1}, headers=headers).run()


# Keys

KEYS: dict[str, tuple[list[tuple[str, str]], int]] = {
    "bearer": ([BEARER], 200),
    "bearer in any case": ([("Authorization", f"bEARER {KEY}")], 200),
    "x-api-key": ([("x-api-key", KEY)], 200),
    "api-key of Azure": ([("api-key", KEY)], 200),
    "two api-key headers": ([("api-key", KEY), ("api-key", KEY)], 401),
    "same key in all headers": ([BEARER, ("x-api-key", KEY), ("api-key", KEY)], 200),
    "x-api-key and a wrong api-key": ([("x-api-key", KEY), ("api-key", "sk-wrong")], 401),
    "x-api-key and another scheme": ([("authorization", "Basic eDp5"), ("x-api-key", KEY)], 200),
    "no key": ([], 401),
    "empty bearer token": ([("authorization", "Bearer ")], 401),
    "wrong": ([("authorization", "Bearer sk-wrong")], 401),
    "key without a scheme": ([("authorization", KEY)], 401),
    "another scheme": ([("authorization", f"Basic {KEY}")], 401),
    "same key in both headers": ([BEARER, ("x-api-key", KEY)], 200),
    "wrong bearer token and the x-api-key": ([("authorization", "Bearer sk-wrong"), ("x-api-key", KEY)], 401),
    "bearer token and a wrong x-api-key": ([BEARER, ("x-api-key", "sk-wrong")], 401),
    "two bearer headers": ([BEARER, BEARER], 401),
    "two x-api-key headers": ([("x-api-key", KEY), ("x-api-key", "other")], 401),
    "long key": ([("authorization", "Bearer " + "x" * 10_000)], 401),
    "key with control characters": ([("authorization", "Bearer \xff\x00\xfe")], 401),
}


@pytest.mark.parametrize(("headers", "status"), KEYS.values(), ids=KEYS)
async def test_only_the_valid_key_is_accepted(headers: list[tuple[str, str]], status: int) -> None:
    response = await post(keyed_gateway(), *headers)
    assert response.status == status
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
        assert KEY not in error["message"]
    else:
        assert response.json() == {"tenant": "default", "body": {"a": 1}}


async def test_the_authenticator_decides_and_names_the_tenant() -> None:
    async def authenticate(key: str | None) -> Caller:
        if key != "k":
            raise NotAuthenticated("no")
        return Caller("team")

    app = gateway(authenticate=authenticate)
    assert (await post(app)).status == 401
    assert (await post(app, ("x-api-key", "k"))).json()["tenant"] == "team"


PATHS = [
    "/v1/echo",
    "/v1/cancel",
    "/nowhere",
    "/",
    "//v1/echo",
    "/v1/../health/liveliness",
    "/health",
    "/health/",
    "/health/liveliness/",
    "//health/liveliness",
    "/health/liveliness/../../v1/echo",
    "/HEALTH/liveliness",
    "/metrics",
    "/docs",
    "/openapi.json",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", ["localhost", "x/health/liveliness?y=", "/health/liveliness"])
async def test_no_spelling_of_a_path_bypasses_authentication(path: str, host: str) -> None:
    headers = [("host", host), ("x-forwarded-prefix", "/health/liveliness")]
    for method in ("GET", "POST", "OPTIONS", "HEAD"):
        assert (await Exchange(keyed_gateway(), method, path, headers=headers).run()).status == 401


@pytest.mark.parametrize("path", sorted(HEALTH_PATHS))
async def test_health_needs_no_key(path: str) -> None:
    assert (await Exchange(keyed_gateway(), "GET", path).run()).status in {200, 404}


async def test_a_websocket_without_a_key_is_refused() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/responses", "headers": [(b"host", b"localhost")], "state": {}}
    await keyed_gateway()(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


# Hosts and origins

HOSTS = {
    "localhost": True,
    "localhost:4000": True,
    "LOCALHOST:4000": True,
    "127.0.0.1:4000": True,
    "127.8.8.8": True,
    "[::1]:4000": True,
    "example.com": False,
    "localhost.example.com": False,
    "127.0.0.1.example.com": False,
    "10.0.0.1:4000": False,
    "0.0.0.0:4000": False,
    "user@localhost": False,
    "localhost/health/liveliness?x=": False,
    "localhost:port": False,
    "": False,
    "[::1": False,
    "2130706433": False,
    "127.1": False,
}


@pytest.mark.parametrize(("host", "is_local"), HOSTS.items())
async def test_a_gateway_without_keys_answers_loopback_hosts_only(host: str, is_local: bool) -> None:
    response = await post(gateway(), ("host", host))
    assert response.status == (200 if is_local else 403)
    if not is_local:
        assert response.json()["error"]["code"] == "permission_denied"
    assert is_local_host_header(host) == is_local


ORIGINS: list[tuple[str, str, int]] = [
    ("localhost:4000", "http://localhost:4000", 200),
    ("LOCALHOST:4000", "http://localhost:4000", 200),
    ("127.0.0.1:4000", "http://127.0.0.1:4000", 200),
    ("[::1]:4000", "http://[::1]:4000", 200),
    ("localhost", "http://localhost", 200),
    ("localhost:4000", "https://app.example.com", 200),
    ("localhost:4000", "http://localhost:3000", 403),
    ("localhost:4000", "http://localhost", 403),
    ("localhost:4000", "http://127.0.0.1:4000", 403),
    ("localhost", "http://[::1]:8080", 403),
    ("localhost:4000", "https://evil.example.com", 403),
    ("localhost:4000", "http://localhost:4000.evil.com", 403),
    ("localhost:4000", "null", 403),
    ("localhost:4000", "", 403),
    ("localhost:4000", "file://", 403),
]


@pytest.mark.parametrize(("host", "origin", "status"), ORIGINS)
async def test_a_gateway_without_keys_answers_its_own_and_listed_origins_only(
    host: str, origin: str, status: int
) -> None:
    app = gateway(origins=["https://app.example.com"])
    assert (await post(app, ("host", host), ("origin", origin))).status == status


async def test_two_host_headers_are_refused() -> None:
    assert (await post(gateway(), ("host", "localhost"), ("host", "evil.com"))).status == 403


async def test_a_gateway_with_keys_accepts_any_host_and_origin() -> None:
    assert (await post(keyed_gateway(), ("host", "llm.example.com"), ("origin", "https://x.com"), BEARER)).status == 200


# CORS

ALLOWED = "access-control-allow-origin"


async def test_cors_is_off_without_listed_origins() -> None:
    response = await post(keyed_gateway(), BEARER, ("origin", "https://app.example.com"))
    assert not [name for name in response.headers if name.startswith("access-control")]
    preflight = [("origin", "https://app.example.com"), ("access-control-request-method", "POST")]
    assert (await Exchange(keyed_gateway(), "OPTIONS", "/v1/echo", headers=preflight).run()).status == 401


async def test_a_listed_origin_gets_cors_headers_and_preflight_responses() -> None:
    app = keyed_gateway(origins=["https://app.example.com"])
    origin = ("origin", "https://app.example.com")
    response = await post(app, BEARER, origin)
    assert response.headers[ALLOWED] == "https://app.example.com"
    assert response.headers["vary"] == "Origin"
    unauthorized = await post(app, origin)
    assert unauthorized.status == 401
    assert unauthorized.headers[ALLOWED] == "https://app.example.com"
    preflight_headers = [
        origin,
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "x-stainless-os"),
    ]
    preflight = await Exchange(app, "OPTIONS", "/v1/echo", headers=preflight_headers).run()
    assert preflight.status == 204
    assert preflight.headers["access-control-allow-headers"] == "x-stainless-os"
    assert preflight.headers["access-control-allow-methods"] == "GET, POST"
    other = await post(app, BEARER, ("origin", "https://other.example.com"))
    assert ALLOWED not in other.headers


def test_a_web_page_can_read_all_documented_headers() -> None:
    limits = QuotaStatus(limits=KeyLimits(rpm=1, tpm=1), requests_left=1, tokens_left=1)
    # A web page has no use for the challenge in `www-authenticate`.
    assert {*HEADERS, *limit_headers(limits)} - {"www-authenticate"} <= {*EXPOSED.split(", ")}


# Bodies

MEDIA: dict[str, tuple[list[tuple[str, str]], int]] = {
    "json": ([("content-type", "application/json")], 200),
    "json in utf-8": ([("content-type", "Application/JSON; charset=utf-8")], 200),
    "json in quoted utf-8": ([("content-type", 'application/json;charset="UTF-8"')], 200),
    "json with another parameter": ([("content-type", "application/json; profile=x")], 200),
    "json in utf-16": ([("content-type", "application/json; charset=utf-16")], 415),
    "json in latin-1": ([("content-type", "application/json; charset=ISO-8859-1")], 415),
    "no content type": ([], 415),
    "text": ([("content-type", "text/plain")], 415),
    "a form": ([("content-type", "application/x-www-form-urlencoded")], 415),
    "list of types": ([("content-type", "text/plain, application/json")], 415),
    "two content-type headers": ([("content-type", "application/json"), ("content-type", "text/plain")], 415),
    "deflate": ([("content-type", "application/json"), ("content-encoding", "deflate")], 415),
    "two encodings": ([("content-type", "application/json"), ("content-encoding", "identity, br")], 415),
    "identity": ([("content-type", "application/json"), ("content-encoding", "identity")], 200),
}


@pytest.mark.parametrize(("headers", "status"), MEDIA.values(), ids=MEDIA)
async def test_only_utf8_json_bodies_in_known_codings_are_accepted(headers: list[tuple[str, str]], status: int) -> None:
    sent = [("content-length", "7"), BEARER, *headers]
    response = await Exchange(keyed_gateway(), "POST", "/v1/echo", body=b'{"a":1}', headers=sent).run()
    assert response.status == status
    if status == 415:
        assert response.json()["error"]["code"] == "unsupported_media_type"


WITHOUT_ENDPOINT: dict[str, tuple[str, str, list[tuple[str, str]], int]] = {
    "a form for an unknown path": ("POST", "/v1/files", [("content-type", "multipart/form-data; boundary=x")], 404),
    "a form with a wrong method": ("PUT", "/v1/echo", [("content-type", "multipart/form-data; boundary=x")], 405),
    "an unknown coding for an unknown path": ("POST", "/v1/files", [("content-encoding", "br")], 404),
    # Without the refusal, the gateway would read the whole body.
    "a large body for an unknown path": ("POST", "/v1/files", [("content-length", "100000000")], 413),
}


@pytest.mark.parametrize(("method", "path", "headers", "status"), WITHOUT_ENDPOINT.values(), ids=[*WITHOUT_ENDPOINT])
async def test_a_missing_endpoint_is_reported_before_faults_of_the_body(
    method: str, path: str, headers: list[tuple[str, str]], status: int
) -> None:
    sent = [BEARER, *dict([("content-length", "7"), *headers]).items()]
    response = Exchange(keyed_gateway(), method, path, body=[], headers=sent, endless=True)
    await asyncio.wait_for(response.run(), 1)
    assert response.status == status


async def test_a_request_without_body_needs_no_content_type() -> None:
    assert (await Exchange(keyed_gateway(), "POST", "/v1/cancel", headers=[BEARER]).run()).status == 200


SENT = [("content-type", "application/json"), BEARER]


async def test_a_body_with_too_large_a_content_length_is_not_read() -> None:
    app = keyed_gateway(max_body_bytes=1000)
    response = Exchange(app, "POST", "/v1/echo", body=[], headers=[*SENT, ("content-length", "1001")], endless=True)
    await asyncio.wait_for(response.run(), 1)
    assert response.status == 413
    assert response.headers["connection"] == "close"
    assert response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("length", [[], [("content-length", "10")]], ids=["chunked", "wrong content-length"])
async def test_the_size_limit_counts_received_bytes(length: list[tuple[str, str]]) -> None:
    app = keyed_gateway(max_body_bytes=1000)
    pieces = [b'{"a":"', *([b"x" * 100] * 20), b'"}']
    headers = [*SENT, *length, *([("transfer-encoding", "chunked")] if not length else [])]
    response = await Exchange(app, "POST", "/v1/echo", body=pieces, headers=headers).run()
    assert response.status == 413
    complete = await Exchange(app, "POST", "/v1/echo", body=[b'{"a":', b"1}"], headers=headers).run()
    assert complete.status == 200


@pytest.mark.parametrize(("size", "status"), [(900, 200), (1100, 413)])
async def test_the_size_limit_applies_to_a_body_that_arrived_with_its_head(size: int, status: int) -> None:
    app, body = keyed_gateway(max_body_bytes=1000), b'{"a":"%s"}' % (b"x" * (size - 8))
    headers = [*SENT, ("transfer-encoding", "chunked")]
    exchange = Exchange(app, "POST", "/v1/echo", body=body, headers=headers, state={ARRIVED_BYTES: len(body)})
    assert (await exchange.run()).status == status


@pytest.mark.parametrize("length", ["-1", "1e3", "+5", "0x10", "5, 5", "9" * 30, "\xb2"])
async def test_an_invalid_content_length_is_refused(length: str) -> None:
    headers = [*SENT, ("content-length", length)]
    response = await Exchange(keyed_gateway(), "POST", "/v1/echo", body=b"{}", headers=headers).run()
    assert response.status in {400, 413}


async def test_an_incomplete_body_times_out() -> None:
    app = keyed_gateway(body_deadline_s=0.05)
    headers = [*SENT, ("transfer-encoding", "chunked")]
    response = Exchange(app, "POST", "/v1/echo", body=[b'{"a":'], headers=headers, endless=True)
    await asyncio.wait_for(response.run(), 1)
    assert response.status == 408
    assert response.headers["connection"] == "close"
    assert response.json()["error"]["code"] == "body_timeout"


async def test_a_disconnect_during_the_body_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    headers = [*SENT, ("transfer-encoding", "chunked")]
    response = Exchange(keyed_gateway(), "POST", "/v1/echo", body=[b'{"a":'], headers=headers, endless=True).start()
    response.leave()
    await response.ended(within_s=1)
    assert response.status == 400
    assert caplog.text == ""


async def test_the_body_deadline_does_not_apply_to_the_response() -> None:
    assert (await post(keyed_gateway(body_deadline_s=0.05), BEARER, path="/v1/slow")).status == 200


async def test_a_request_without_a_key_is_refused_before_its_body() -> None:
    headers = [("content-type", "application/json"), ("content-length", "99")]
    response = Exchange(keyed_gateway(), "POST", "/v1/echo", body=[], headers=headers, endless=True)
    await asyncio.wait_for(response.run(), 1)
    assert response.status == 401


# Request ids


async def test_every_response_has_a_unique_request_id() -> None:
    app = keyed_gateway()
    responses = [await post(app, BEARER), await post(app), await Exchange(app, "GET", "/health/liveliness").run()]
    ids = [response.headers["x-request-id"] for response in responses]
    assert len(set(ids)) == 3
    assert all(id.startswith("req_") for id in ids)


async def test_request_id_of_a_route_is_replaced() -> None:
    response = await post(keyed_gateway(), BEARER, path="/v1/named")
    ids = [value for name, value in response.sent[0]["headers"] if name == b"x-request-id"]
    assert ids == [b"req_0"]
    assert response.headers["x-more"] == "1"
