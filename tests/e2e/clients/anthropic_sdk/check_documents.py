"""Documents as input of Messages, through Anthropic's SDK."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import Anthropic, BadRequestError
from anthropic_sdk.messaging import create_message, scripted_request, text_of
from sdk_types import PROMPT

from documents import BROKEN, FILES, base64


def message_fields(source: dict[str, Any], **fields: Any) -> dict[str, Any]:
    request = scripted_request(PROMPT)
    question = {"type": "text", "text": request["messages"][-1]["content"]}
    document = {"type": "document", "source": source, **fields}
    return {**request, "messages": [{"role": "user", "content": [document, question]}]}


@pytest.mark.parametrize(("name", "media_type", "content", "line"), FILES.values(), ids=FILES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_document_is_read(
    scripted: Anthropic, name: str, media_type: str, content: bytes, line: str, stream: bool
) -> None:
    source = {"type": "base64", "media_type": media_type, "data": base64(content)}
    text = text_of(create_message(scripted, stream, message_fields(source, title=name, context="About tea.")))
    assert f'About tea.\n<file name="{name}" mark="' in text
    assert line in text


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "Green tea"},
        {"type": "content", "content": [{"type": "text", "text": "Green tea"}]},
    ],
    ids=["text", "content"],
)
def test_text_sources_are_quoted_too(scripted: Anthropic, source: dict[str, Any]) -> None:
    text = text_of(scripted.messages.create(**message_fields(source, title="tea")))
    assert '<file name="tea" mark="' in text
    assert "\nGreen tea\n</file" in text


def test_the_tokens_of_a_document_are_counted(scripted: Anthropic) -> None:
    def counted(text: str) -> int:
        source = {"type": "base64", "media_type": "text/plain", "data": base64(text.encode())}
        fields = message_fields(source)
        return scripted.messages.count_tokens(model=fields["model"], messages=fields["messages"]).input_tokens

    assert counted("tea" * 50) > counted("tea")


def test_a_broken_document_is_refused_with_its_field(scripted: Anthropic) -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": base64(BROKEN)}
    with pytest.raises(BadRequestError) as refused:
        scripted.messages.create(**message_fields(source))
    assert "messages.0.content.0.source.data" in str(refused.value)


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"type": "url", "url": "https://example.com/tea.pdf"}, "url"),
        ({"type": "file", "file_id": "file_1"}, "file_id"),
    ],
    ids=["url", "file_id"],
)
def test_a_document_elsewhere_is_refused_with_its_field(scripted: Anthropic, source: Any, field: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        scripted.messages.create(**message_fields(source))
    assert f"messages.0.content.0.source.{field}" in str(refused.value)
