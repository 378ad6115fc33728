"""Files as input of Chat Completions, Responses and Conversations, through the OpenAI SDK."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai_sdk.asking import scripted_request
from openai_sdk.responding import to_play
from sdk_types import PROMPT

from documents import BROKEN, FILES, data_url

files = pytest.mark.parametrize(("name", "media_type", "content", "line"), FILES.values(), ids=FILES)
streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def chat_fields(name: str, url: str) -> dict[str, Any]:
    fields = scripted_request(PROMPT)
    part = {"type": "file", "file": {"filename": name, "file_data": url}}
    question = {"type": "text", "text": fields["messages"][-1]["content"]}
    return {**fields, "messages": [{"role": "user", "content": [part, question]}]}


def input_with(name: str, url: str, question: str) -> Any:
    part = {"type": "input_file", "filename": name, "file_data": url}
    return [{"role": "user", "content": [part, {"type": "input_text", "text": question}]}]


def response_fields(name: str, url: str) -> dict[str, Any]:
    fields = to_play(PROMPT)
    return {**fields, "input": input_with(name, url, fields["input"])}


@files
@streams
def test_chat_reads_a_file(
    scripted: OpenAI, name: str, media_type: str, content: bytes, line: str, stream: bool
) -> None:
    fields = chat_fields(name, data_url(media_type, content))
    if stream:
        with scripted.chat.completions.stream(**fields) as answer:
            text = answer.get_final_completion().choices[0].message.content
    else:
        text = scripted.chat.completions.create(**fields).choices[0].message.content
    assert f'<file name="{name}" mark="' in (text or "")
    assert line in (text or "")


@files
@streams
def test_responses_read_a_file(
    scripted: OpenAI, name: str, media_type: str, content: bytes, line: str, stream: bool
) -> None:
    fields = response_fields(name, data_url(media_type, content))
    if stream:
        with scripted.responses.stream(**fields) as answer:
            text = answer.get_final_response().output_text
    else:
        text = scripted.responses.create(**fields).output_text
    assert f'<file name="{name}" mark="' in text
    assert line in text


def test_a_conversation_keeps_the_text_of_a_file(scripted: OpenAI) -> None:
    name, media_type, content, line = FILES["pdf"]
    created = scripted.conversations.create(items=input_with(name, data_url(media_type, content), "Read it."))
    assert line in scripted.responses.create(**to_play(PROMPT), conversation=created.id).output_text


def test_a_broken_file_is_refused_with_its_field(scripted: OpenAI) -> None:
    url = data_url("application/pdf", BROKEN)
    with pytest.raises(BadRequestError) as refused:
        scripted.chat.completions.create(**chat_fields("tea.pdf", url))
    assert (refused.value.param, refused.value.code) == ("messages.0.content.0.file.file_data", "invalid_value")
    with pytest.raises(BadRequestError) as refused:
        scripted.responses.create(**response_fields("tea.pdf", url))
    assert (refused.value.param, refused.value.code) == ("input.0.content.0.file_data", "invalid_value")
