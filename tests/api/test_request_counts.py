"""Limits on the number of members of lists and objects in requests."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from unisono.api.chat.schema import ChatRequest
from unisono.api.completions.schema import CompletionRequest
from unisono.api.field_types import MAX_BIASES, MAX_MESSAGES, MAX_PARTS
from unisono.api.messages.schema import MessagesRequest
from unisono.api.responses.schema import ResponsesRequest

HI = [{"role": "user", "content": "Hi"}]
BIASES = {str(token): 1 for token in range(MAX_BIASES + 1)}
INVALID = {"type": "x"}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": HI, **fields}


# case: (request, body, path of the field)
TOO_MANY: dict[str, tuple[type[BaseModel], dict[str, Any], str]] = {
    "chat messages": (ChatRequest, chat(messages=[INVALID] * (MAX_MESSAGES + 1)), "messages"),
    "chat parts": (
        ChatRequest,
        chat(messages=[{"role": "user", "content": [INVALID] * (MAX_PARTS + 1)}]),
        "messages.0.content",
    ),
    "chat biases": (ChatRequest, chat(logit_bias=BIASES), "logit_bias"),
    "chat tools": (ChatRequest, chat(tools=[INVALID] * 513), "tools"),
    "raw biases": (CompletionRequest, {"model": "m", "prompt": "Hi", "logit_bias": BIASES}, "logit_bias"),
    "messages": (
        MessagesRequest,
        {"model": "m", "max_tokens": 1, "messages": [INVALID] * (MAX_MESSAGES + 1)},
        "messages",
    ),
    "blocks": (
        MessagesRequest,
        {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [INVALID] * (MAX_PARTS + 1)}]},
        "messages.0.content",
    ),
    "items": (ResponsesRequest, {"model": "m", "input": [INVALID] * (MAX_MESSAGES + 1)}, "input"),
    "metadata": (
        ResponsesRequest,
        {"model": "m", "input": "Hi", "metadata": {f"k{n}": 1 for n in range(17)}},
        "metadata",
    ),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_members_are_counted_before_they_are_validated(name: str) -> None:
    kind, body, path = TOO_MANY[name]
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    [error] = caught.value.errors()
    assert ".".join(map(str, error["loc"])) == path
    assert "20,000" in error["msg"] or "limit" in error["msg"]


ALL_INVALID: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "chat": (ChatRequest, chat(messages=[{"role": "user", "content": [INVALID] * 9}] * 9)),
    "messages": (
        MessagesRequest,
        {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [INVALID] * 9}] * 9},
    ),
    "responses": (ResponsesRequest, {"model": "m", "input": [{"role": "user", "content": [{"type": []}] * 9}] * 9}),
    "biases": (ChatRequest, chat(logit_bias={str(token): 101 for token in range(9)})),
}


@pytest.mark.parametrize("name", ALL_INVALID)
def test_validation_ends_at_the_first_invalid_member(name: str) -> None:
    kind, body = ALL_INVALID[name]
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() == 1


def test_the_greatest_number_of_biases_is_accepted() -> None:
    biases = dict(list(BIASES.items())[:MAX_BIASES])
    assert len(ChatRequest.model_validate(chat(logit_bias=biases)).logit_bias or ()) == MAX_BIASES
