"""Errors of the Messages API as exceptions of the SDK."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic_sdk.messaging import THINKING, create_message, message_request, scripted_request

if TYPE_CHECKING:
    from conftest import Stage

FAILURES: dict[str, tuple[dict[str, Any], type[anthropic.APIStatusError], str, str]] = {
    "an unknown model": ({"model": "nothing"}, anthropic.NotFoundError, "not_found_error", "model"),
    "negative max_tokens": ({"max_tokens": -1}, anthropic.BadRequestError, "invalid_request_error", "max_tokens"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "messages.0.content.0.type",
    ),
    "a tool result of another call": (
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_2"}]},
            ]
        },
        anthropic.BadRequestError,
        "invalid_request_error",
        "messages.1.content.0.tool_use_id",
    ),
    "an oversized body": (
        {"messages": [{"role": "user", "content": "word " * 120_000}]},
        anthropic.ContentTooLargeError,
        "request_too_large",
        "larger",
    ),
    "a busy backend": (
        {"messages": [{"role": "user", "content": "script: busy"}]},
        anthropic.ServiceUnavailableError,
        "overloaded_error",
        "",
    ),
    "a prompt beyond the context": (
        {"model": "small", "messages": [{"role": "user", "content": "word " * 400}]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "prompt is too long: ",
    ),
}


@pytest.mark.parametrize(("fields", "exception", "error_type", "message_part"), FAILURES.values(), ids=FAILURES)
def test_a_failure_raises_the_matching_exception(
    scripted: Anthropic,
    fields: dict[str, Any],
    exception: type[anthropic.APIStatusError],
    error_type: str,
    message_part: str,
) -> None:
    with pytest.raises(exception) as caught:
        scripted.messages.create(**scripted_request("an answer", **fields))
    error = caught.value
    assert error.type == error_type
    assert message_part in (error.api_message or "")
    assert error.request_id
    assert error.request_id == error.body["request_id"]  # type: ignore[index]


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_a_key_is_accepted_in_either_header(stage: Stage, connect: Callable[..., Anthropic], header: str) -> None:
    right, wrong = stage.key, "sk-not-the-only-key"

    def client(key: str) -> Anthropic:
        value = key if header == "x-api-key" else f"Bearer {key}"
        omitted = anthropic.Omit()
        headers = {"X-Api-Key": omitted, "Authorization": omitted} | {header.title(): value}
        return connect(stage.scripted, default_headers=headers)

    assert client(right).messages.create(**scripted_request("an answer")).content
    with pytest.raises(anthropic.AuthenticationError) as caught:
        client(wrong).messages.create(**scripted_request("an answer"))
    assert caught.value.type == "authentication_error"
    assert wrong not in str(caught.value)


@pytest.mark.parametrize("name", ["a reset later", "garbage later"])
def test_a_failure_during_a_stream_is_raised(scripted: Anthropic, name: str) -> None:
    with pytest.raises(anthropic.APIStatusError) as caught:
        create_message(scripted, True, scripted_request(name))
    assert caught.value.type in ("overloaded_error", "api_error")


def test_forged_thinking_blocks_are_left_out_with_a_note(scripted: Anthropic) -> None:
    fields = scripted_request("an answer", thinking=THINKING)
    thinking_block, text_block = scripted.messages.create(**fields).content
    forged = thinking_block.model_copy(update={"thinking": "Let me see about something else."})
    for block, positions in ((thinking_block, []), (forged, ["messages.1.content.0"])):
        messages = [
            *fields["messages"],
            {"role": "assistant", "content": [block, text_block]},
            {"role": "user", "content": "And?"},
        ]
        assert scripted.messages.count_tokens(model="scripted", messages=messages).input_tokens
        answer: Any = scripted.messages.create(**{**fields, "messages": messages})
        notes = answer.model_extra["unisono"].get("notes", [])
        assert [note.partition(":")[0] for note in notes] == positions


def test_anthropic_defined_tools_alone_are_rejected(demo: Anthropic) -> None:
    for tool in (
        {"type": "computer_20250124", "name": "computer"},
        {"type": "web_search_20250305", "name": "web_search"},
    ):
        with pytest.raises(anthropic.BadRequestError, match=r"tools.0.type"):
            demo.messages.create(**message_request("Hello", tools=[tool]))
