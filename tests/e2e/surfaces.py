"""The API surfaces of a gateway: how a test sends requests to them and reads answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.e2e.gateway import Answer, message_of
from tests.e2e.messages import text_in
from tests.e2e.responses import text_of as text_in_response

RAW_PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@dataclass(frozen=True)
class Surface:
    """An API surface.

    `text` and `finish` read any answer with status 200, `error` reads an error body or event. `finishes` is a normal
    end, `fails` the error type in a body.
    """

    path: str
    fields: dict[str, Any]
    text: Callable[[Answer], str]
    finish: Callable[[Answer], object]
    error: Callable[[Any], object]
    finishes: str
    fails: str = "backend_timeout"
    # Error type in the last event of a stream.
    breaks: str = "backend_timeout"


def chat_text(answer: Answer) -> str:
    return message_of(_without_error(answer)).content or ""


def chat_finish(answer: Answer) -> object:
    return message_of(_without_error(answer)).finish_reason


def _without_error(answer: Answer) -> Answer:
    events_with_choices = [event for event in answer.events if "choices" in event]
    return Answer(answer.status, answer.headers, answer.raw, answer.body, events_with_choices)


def response_text(answer: Answer) -> str:
    if not answer.events:
        return text_in_response(answer.body)
    return "".join(event["delta"] for event in answer.events if event["type"] == "response.output_text.delta")


def response_finish(answer: Answer) -> object:
    body = answer.events[-1].get("response", {}) if answer.events else answer.body
    return body.get("status")


def response_error(body: Any) -> object:
    if body.get("type") == "response.failed":
        assert body["response"]["status"] == "failed"
        return body["response"]["error"]["code"]
    # Pass-through answers end with OpenAI's own error event.
    return body["code"] if body.get("type") == "error" else code_of(body)


def message_text(answer: Answer) -> str:
    if not answer.events:
        return text_in(answer.body["content"])
    deltas = [event["delta"] for event in answer.events if event["type"] == "content_block_delta"]
    return "".join(delta.get("text", "") for delta in deltas)


def message_finish(answer: Answer) -> object:
    if not answer.events:
        return answer.body["stop_reason"]
    return next((event["delta"]["stop_reason"] for event in answer.events if event["type"] == "message_delta"), None)


def message_error(body: Any) -> object:
    return body["error"]["type"] if body["type"] == "error" else body


def completion_text(answer: Answer) -> str:
    parts = answer.events or [answer.body]
    # Without markers: the header before the text is not part of it.
    return "".join(each["choices"][0]["text"] for each in parts if "choices" in each).partition("final")[2]


def completion_finish(answer: Answer) -> object:
    parts = answer.events or [answer.body]
    return next((each["choices"][0]["finish_reason"] for each in reversed(parts) if "choices" in each), None)


def code_of(body: Any) -> object:
    return body["error"]["code"]


CHAT = Surface("/v1/chat/completions", MESSAGES, chat_text, chat_finish, code_of, "stop")
RESPONSES = Surface("/v1/responses", {"input": "Hi"}, response_text, response_finish, response_error, "completed")
# API surfaces by name. On all of them, a hanging backend is a timeout.
SURFACES = {
    "chat": CHAT,
    "responses": replace(RESPONSES, breaks="server_error"),
    "messages": Surface(
        "/v1/messages",
        {**MESSAGES, "max_tokens": 500},
        message_text,
        message_finish,
        message_error,
        "end_turn",
        fails="timeout_error",
        breaks="timeout_error",
    ),
    "completions": Surface(
        "/v1/completions",
        {"prompt": RAW_PROMPT, "max_tokens": 500},
        completion_text,
        completion_finish,
        code_of,
        "stop",
    ),
    "pass-through": CHAT,
    "pass-through responses": RESPONSES,
}


def unisono_object(response: Answer) -> dict[str, Any]:
    """Return the last `unisono` object of a response, streamed or not."""
    objects: list[Any] = []

    def search(value: Any) -> None:
        if isinstance(value, dict):
            objects.extend([value["unisono"]] if isinstance(value.get("unisono"), dict) else [])
            for inner in value.values():
                search(inner)

    search(response.body)
    for event in response.events:
        search(event)
    assert response.status == 200, response.raw
    return dict(objects[-1])
