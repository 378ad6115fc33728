"""Error responses: status and body of every error class, without internal details."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from tests.api.asgi import Exchange
from unisono.api.error_responses import ErrorResponses, failure_of, to_body, to_response
from unisono.api.fastapi_app import register
from unisono.api.messages.error_format import ERROR_FORMATS
from unisono.errors import (
    BackendOverloaded,
    BodyTooLarge,
    InternalError,
    InvalidRequest,
    MalformedRequest,
    QuotaExceeded,
    UnisonoError,
)
from unisono.server.request_head import refusal


def classes_of(root: type[UnisonoError]) -> Iterator[type[UnisonoError]]:
    yield root
    for kind in root.__subclasses__():
        yield from classes_of(kind)


ERROR_CLASSES = list(classes_of(UnisonoError))


@pytest.mark.parametrize("kind", ERROR_CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_class_has_a_status_and_a_body(kind: type[UnisonoError]) -> None:
    response = to_response(kind("what happened", param="messages.0.role"))
    assert 400 <= response.status_code < 600
    assert response.headers["content-type"] == "application/json"
    body = to_body(kind("what happened", param="messages.0.role"))
    assert set(body) == {"error"}
    assert body["error"] == {
        "message": "what happened",
        "type": kind.type,
        "param": "messages.0.role",
        "code": kind.code,
    }
    assert kind.type
    assert kind.code
    assert (kind.type == "server_error") == (response.status_code >= 500)


@pytest.mark.parametrize(
    "kind", [kind for kind in ERROR_CLASSES if kind.status in (429, 503)], ids=lambda kind: kind.__name__
)
def test_overload_errors_have_a_retry_after_header(kind: type[UnisonoError]) -> None:
    assert to_response(kind("busy")).headers["retry-after"] == "1"
    assert to_response(kind("busy", retry_after_s=2.2)).headers["retry-after"] == "3"


@pytest.mark.parametrize("kind", ERROR_CLASSES, ids=lambda kind: kind.__name__)
def test_only_permanent_errors_forbid_retries(kind: type[UnisonoError]) -> None:
    is_permanent = kind.status in (400, 401, 403, 404, 405, 409, 413, 415, 422) or issubclass(kind, QuotaExceeded)
    assert to_response(kind("no")).headers.get("x-should-retry") == ("false" if is_permanent else None)
    forbidden_by_the_listener = b"\r\nx-should-retry: false\r\n" in refusal(kind("no"), b"/v1/messages", {})
    assert forbidden_by_the_listener == is_permanent


TARGETS = {
    "a path of Messages": (b"/v1/messages?beta=true", True),
    "another path": (b"/v1/chat/completions", False),
    "an unreadable path": (b"", False),
}


@pytest.mark.parametrize(("target", "is_anthropics"), TARGETS.values(), ids=TARGETS)
def test_the_path_selects_the_format_of_errors_before_a_request(target: bytes, is_anthropics: bool) -> None:
    head, _, body = refusal(MalformedRequest("not HTTP"), target, ERROR_FORMATS).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"request-id" not in head
    assert (orjson.loads(body).get("type") == "error") is is_anthropics


def test_an_error_with_an_unread_body_closes_the_connection() -> None:
    assert to_response(BodyTooLarge("large")).headers["connection"] == "close"
    assert "connection" not in to_response(InvalidRequest("no")).headers


def test_an_unexpected_exception_is_logged_and_not_exposed(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise KeyError("the secret")
    except KeyError as error:
        failure = failure_of(error)
    assert isinstance(failure, InternalError)
    assert "secret" not in failure.message
    assert "Traceback" in caplog.text
    assert "the secret" in caplog.text


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "invalid_value"), (404, "not_found"), (405, "method_not_allowed"), (418, "internal_error")],
)
def test_http_exceptions_are_mapped_to_error_codes(status: int, code: str) -> None:
    assert failure_of(HTTPException(status, "x")).code == code


def test_a_pydantic_error_names_the_field_without_its_value() -> None:
    class Inner(BaseModel):
        many: list[int]

    class Outer(BaseModel):
        inner: Inner

    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"inner": {"many": [1, "the secret"]}})
    failure = failure_of(caught.value)
    assert failure.status == 400
    assert failure.param == "inner.many.1"
    assert "secret" not in failure.message


def test_a_pydantic_error_shortens_a_huge_key() -> None:
    class Biased(BaseModel):
        bias: dict[str, int]

    with pytest.raises(ValidationError) as caught:
        Biased.model_validate({"bias": {"x" * 1_000_000: "no"}})
    failure = failure_of(caught.value)
    assert failure.param is not None
    assert failure.param.startswith("bias.xxx")
    assert len(failure.message) < 300


def app(*, broken: bool = False) -> FastAPI:
    gateway = FastAPI(docs_url=None, openapi_url=None)
    register(gateway)

    @gateway.post("/there")
    async def there() -> dict[str, Any]:
        if broken:
            raise RuntimeError("the secret")
        raise BackendOverloaded("busy", retry_after_s=5)

    return gateway


async def test_unknown_paths_and_methods_get_openai_errors() -> None:
    unknown_path = await Exchange(app(), "GET", "/nowhere").run()
    assert unknown_path.status == 404
    assert unknown_path.json()["error"]["code"] == "not_found"
    assert "/nowhere" in unknown_path.json()["error"]["message"]
    wrong_method = await Exchange(app(), "GET", "/there").run()
    assert wrong_method.status == 405
    assert wrong_method.headers["allow"] == "POST"
    assert wrong_method.json()["error"]["code"] == "method_not_allowed"


async def test_an_error_raised_in_a_route_becomes_its_response() -> None:
    response = await Exchange(app(), "POST", "/there").run()
    assert response.status == 503
    assert response.headers["retry-after"] == "5"


async def test_the_error_layer_answers_any_exception_with_500(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("the secret")

    response = await Exchange(ErrorResponses(broken), "POST", "/").run()
    assert response.status == 500
    assert response.json()["error"]["type"] == "server_error"
    assert b"secret" not in response.body
    assert "the secret" in caplog.text


async def test_a_partial_response_is_not_completed_after_an_exception() -> None:
    async def fails_late(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("too late")

    response = Exchange(ErrorResponses(fails_late), "POST", "/")
    with pytest.raises(RuntimeError):
        await response.run()
    assert not response.complete


async def test_a_websocket_is_refused_before_it_opens() -> None:
    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        raise InvalidRequest("no")

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await ErrorResponses(refuses)({"type": "websocket"}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_a_client_that_leaves_before_its_handshake_is_answered_is_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def accepts(scope: Scope, receive: Receive, send: Send) -> None:
        await WebSocket(scope, receive, send).accept()

    incoming: Iterator[Message] = iter([{"type": "websocket.connect"}])
    sent: list[Message] = []

    async def receive() -> Message:
        return next(incoming)

    async def send(message: Message) -> None:
        sent.append(message)
        raise ConnectionError  # as a server raises it for a connection that is closed

    await ErrorResponses(accepts)({"type": "websocket"}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.accept"]
    assert caplog.records == []
