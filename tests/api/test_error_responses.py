"""Every failure has a status and OpenAI's body, and a fault of the gateway tells no secrets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from tests.api.asgi import Exchange
from unisono.api.error_responses import ErrorResponses, failure_of, register, to_body, to_response
from unisono.errors import BackendOverloaded, BodyTooLarge, InternalError, InvalidRequest, UnisonoError
from unisono.server.request_head import refusal


def tree(root: type[UnisonoError]) -> Iterator[type[UnisonoError]]:
    yield root
    for kind in root.__subclasses__():
        yield from tree(kind)


TREE = list(tree(UnisonoError))


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_every_failure_on_the_tree_has_a_status_and_a_body(kind: type[UnisonoError]) -> None:
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


@pytest.mark.parametrize("kind", [kind for kind in TREE if kind.status in (429, 503)], ids=lambda kind: kind.__name__)
def test_who_is_busy_says_when_to_come_back(kind: type[UnisonoError]) -> None:
    assert to_response(kind("busy")).headers["retry-after"] == "1"
    assert to_response(kind("busy", retry_after_s=2.2)).headers["retry-after"] == "3"


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_final_failures_forbid_retries_and_others_do_not(kind: type[UnisonoError]) -> None:
    is_final = kind.status in (400, 401, 403, 404, 405, 409, 413, 415, 422)
    assert to_response(kind("no")).headers.get("x-should-retry") == ("false" if is_final else None)
    over_the_listener = b"\r\nx-should-retry: false\r\n" in refusal(kind("no"), b"/v1/messages", {})
    assert over_the_listener == is_final


def test_an_unread_body_closes_the_connection() -> None:
    assert to_response(BodyTooLarge("large")).headers["connection"] == "close"
    assert "connection" not in to_response(InvalidRequest("no")).headers


def test_an_unknown_exception_is_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
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
def test_the_frameworks_own_exceptions_are_on_the_tree(status: int, code: str) -> None:
    assert failure_of(HTTPException(status, "x")).code == code


def test_a_finding_of_pydantic_names_its_field_and_not_its_value() -> None:
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


def test_a_finding_on_a_monstrous_key_stays_readable() -> None:
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


async def test_unknown_paths_and_methods_answer_in_openais_shape() -> None:
    nowhere = await Exchange(app(), "GET", "/nowhere").run()
    assert nowhere.status == 404
    assert nowhere.json()["error"]["code"] == "not_found"
    assert "/nowhere" in nowhere.json()["error"]["message"]
    wrong = await Exchange(app(), "GET", "/there").run()
    assert wrong.status == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["code"] == "method_not_allowed"


async def test_a_failure_in_a_route_is_its_answer() -> None:
    answer = await Exchange(app(), "POST", "/there").run()
    assert answer.status == 503
    assert answer.headers["retry-after"] == "5"


async def test_the_last_layer_answers_for_anything(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("the secret")

    answer = await Exchange(ErrorResponses(broken), "POST", "/").run()
    assert answer.status == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert b"secret" not in answer.body
    assert "the secret" in caplog.text


async def test_half_an_answer_is_never_completed() -> None:
    async def breaks_off(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("too late")

    answer = Exchange(ErrorResponses(breaks_off), "POST", "/")
    with pytest.raises(RuntimeError):
        await answer.run()
    assert not answer.complete


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
