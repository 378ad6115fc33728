"""Every kind of message and content part of Chat Completions, before the newest message: read or reported.

The table is made from the SDK's types, as that of the Responses API.
"""

from __future__ import annotations

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionMessageParam
from openai.types.chat.chat_completion_assistant_message_param import ContentArrayOfContentPart
from openai_sdk.asking import scripted_request, unisono_fields
from openai_sdk.check_responses_kinds import KNOWN
from sdk_types import ID, PROMPT, WORD, Json, check_known, examples, kind_names, members, parts_in, words_in

KINDS = {kind.__name__: kind for kind in members(ChatCompletionMessageParam)}
PARTS = {
    str(part["type"]): part
    for full in (False, True)
    for union in (ChatCompletionContentPartParam, ContentArrayOfContentPart)
    for part in examples(union, full=full)
}
ROLES = ("user", "system", "developer", "assistant", "tool", "function")
READ = ("text", "refusal")
FUNCTION = {"name": WORD, "arguments": "{}"}
# The message before a message of a role, which cannot stand alone.
BEFORE: dict[str, list[Json]] = {
    "tool": [{"role": "assistant", "tool_calls": [{"id": ID, "type": "function", "function": FUNCTION}]}],
    "function": [{"role": "assistant", "content": None, "function_call": FUNCTION}],
}


def prompt_for(client: OpenAI, messages: list[Json]) -> tuple[str, list[str]]:
    """Return the prompt that a model reads for messages before a newest one, and the notes."""
    fields = scripted_request(PROMPT)
    completion = client.chat.completions.create(**{**fields, "messages": [*messages, *fields["messages"]]})
    return completion.choices[0].message.content or "", unisono_fields(completion).get("notes", [])


def check_message(client: OpenAI, message: Json) -> None:
    before = BEFORE.get(message["role"], [])
    at = f"messages.{len(before)}"
    prompt, notes = prompt_for(client, [*before, message])
    without, _ = prompt_for(client, before)
    assert prompt != without or any(note.startswith(at) for note in notes), message
    for path, part in parts_in(message, at):
        is_reported = any(note.startswith(f"{path}:") for note in notes)
        is_read = part["type"] in READ and any(word in prompt for word in words_in(part))
        assert is_read or is_reported, part


def test_every_kind_is_known() -> None:
    check_known(kind_names(ChatCompletionMessageParam, "messages"), KNOWN)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_message_is_accepted_and_read_or_reported(scripted: OpenAI, kind: str) -> None:
    for message in [*examples(KINDS[kind]), *examples(KINDS[kind], full=True)]:
        # An assistant message with only its role has no content.
        check_message(scripted, message if len(message) > 1 else {**message, "content": WORD})


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", PARTS)
def test_a_kind_of_part_is_accepted_in_every_message(scripted: OpenAI, role: str, kind: str) -> None:
    named = {"tool": {"tool_call_id": ID}, "function": {"name": WORD}}.get(role, {})
    check_message(scripted, {"role": role, "content": [PARTS[kind]], **named})


def test_an_answer_in_audio_is_reported(scripted: OpenAI) -> None:
    check_message(scripted, {"role": "assistant", "audio": {"id": "audio_1"}})
