"""Failures, as the SDK's exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic_sdk.messaging import THINKING, answered, asked, scene

if TYPE_CHECKING:
    from conftest import Stage

REFUSED: dict[str, tuple[dict[str, Any], type[anthropic.APIStatusError], str, str]] = {
    "an unknown model": ({"model": "nothing"}, anthropic.NotFoundError, "not_found_error", "model"),
    "no bound": ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "max_tokens"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "messages.0.content.0.type",
    ),
    "a result of nothing": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]}]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "messages.0.content.0.tool_use_id",
    ),
    "a body that is too large": (
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
    "a prompt that is too long": (
        {"model": "small", "messages": [{"role": "user", "content": "word " * 400}]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "prompt is too long: ",
    ),
}


@pytest.mark.parametrize(("fields", "kind", "type_", "named"), REFUSED.values(), ids=REFUSED)
def test_a_failure_is_the_exception_it_should_be(
    scripted: Anthropic, fields: dict[str, Any], kind: type[anthropic.APIStatusError], type_: str, named: str
) -> None:
    with pytest.raises(kind) as caught:
        scripted.messages.create(**scene("an answer", **fields))
    error = caught.value
    assert error.type == type_
    assert named in (error.api_message or "")
    assert error.request_id
    assert error.request_id == error.body["request_id"]  # type: ignore[index]


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_a_key_is_read_from_either_header(stage: Stage, connect: Callable[..., Anthropic], header: str) -> None:
    right, wrong = stage.key, "sk-not-the-only-key"

    def client(key: str) -> Anthropic:
        value = key if header == "x-api-key" else f"Bearer {key}"
        other = anthropic.Omit()
        headers = {"X-Api-Key": other, "Authorization": other} | {header.title(): value}
        return connect(stage.scripted, default_headers=headers)

    assert client(right).messages.create(**scene("an answer")).content
    with pytest.raises(anthropic.AuthenticationError) as caught:
        client(wrong).messages.create(**scene("an answer"))
    assert caught.value.type == "authentication_error"
    assert wrong not in str(caught.value)


@pytest.mark.parametrize("name", ["a reset later", "garbage later"])
def test_a_failure_within_a_stream_is_raised(scripted: Anthropic, name: str) -> None:
    with pytest.raises(anthropic.APIStatusError) as caught:
        answered(scripted, True, scene(name))
    assert caught.value.type in ("overloaded_error", "api_error")


def test_forged_thoughts_are_refused(scripted: Anthropic) -> None:
    fields = scene("an answer", thinking=THINKING)
    thought, said = scripted.messages.create(**fields).content
    forged = thought.model_copy(update={"thinking": "Let me see about something else."})
    for block, code in ((thought, None), (forged, "messages.1.content.0.signature")):
        talk = [
            *fields["messages"],
            {"role": "assistant", "content": [block, said]},
            {"role": "user", "content": "And?"},
        ]
        if code is None:
            assert scripted.messages.count_tokens(model="scripted", messages=talk).input_tokens
        else:
            with pytest.raises(anthropic.BadRequestError, match=code):
                scripted.messages.create(**{**fields, "messages": talk})


def test_tools_of_anthropics_models_are_refused_where_they_are_all_there_is(demo: Anthropic) -> None:
    for tool in (
        {"type": "bash_20250124", "name": "bash"},
        {"type": "web_search_20250305", "name": "web_search"},
    ):
        with pytest.raises(anthropic.BadRequestError, match=r"tools.0.type"):
            demo.messages.create(**asked("Hello", tools=[tool]))
