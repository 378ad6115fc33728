"""Every kind of input item that the SDK declares, before the newest message: accepted, and read or reported.

The table is made from the SDK's types, so that a new kind fails here first. The conversations API reads the same
items.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import ResponseInputItemParam
from openai_sdk.responding import about, to_play
from sdk_types import (
    ID,
    PROMPT,
    WORD,
    Json,
    check_known,
    examples,
    get_type_hints,
    kind_names,
    members,
    parts_in,
    words_in,
)

KNOWN = Path(__file__).with_name("kinds.txt")
# Kinds that change a setting, and kinds that repeat what the request contains already.
SETTINGS = ("configuration_update", "compaction_trigger", "mcp_list_tools", "mcp_approval_response")
# The item before an item of a kind, which cannot stand alone.
BEFORE = {
    "mcp_approval_response": "mcp_approval_request",
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
    "shell_call_output": "shell_call",
    "local_shell_call_output": "local_shell_call",
    "apply_patch_call_output": "apply_patch_call",
}
# Kinds without a type of their own are references.
REFERENCE = "item_reference"
KINDS = {kind.__name__: kind for kind in members(ResponseInputItemParam)}
MEDIA = ("input_image", "input_file")


def items_of(kind: str) -> list[Json]:
    """Return examples of a kind, with the required fields and with all fields."""
    hints = get_type_hints(KINDS[kind])
    found = [*examples(KINDS[kind]), *examples(KINDS[kind], full=True)]
    for item in found:
        # A result names its call or its tool.
        if "output" in item and "name" in hints:
            item.setdefault("name", WORD)
        if "id" in hints:
            item.setdefault("id", ID)
    return found


FIRST = {str(item["type"]): item for kind in KINDS for item in reversed(items_of(kind)) if item.get("type")}


def items_before(item: Json) -> list[Json]:
    before = BEFORE.get(str(item.get("type")))
    return [FIRST[before]] if before else []


def prompt_for(client: OpenAI, items: list[Json], **fields: Any) -> tuple[str, list[str]]:
    """Return the prompt that a model reads for items before a newest message, and the notes."""
    last = to_play(PROMPT)
    newest = {"role": "user", "content": last.pop("input")}
    response = client.responses.create(input=[*items, newest], **last, **fields)  # type: ignore[arg-type]
    # After an update of the format, the script writes any JSON value instead.
    text = response.output_text if response.output_text.startswith("<start") else "JSON"
    return text, about(response).get("notes", [])


def test_every_kind_is_known() -> None:
    check_known(kind_names(ResponseInputItemParam, "input"), KNOWN)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_item_is_accepted_and_read_or_reported(scripted: OpenAI, kind: str) -> None:
    for item in items_of(kind):
        if item.get("type") in (None, REFERENCE):
            kept = scripted.responses.create(**to_play("an answer"))
            item = {"type": REFERENCE, "id": kept.output[-1].id}
        before = items_before(item)
        at = f"input.{len(before)}"
        prompt, notes = prompt_for(scripted, [*before, item])
        without, _ = prompt_for(scripted, before)
        if any(note.startswith((f"{at}:", f"{at}.type")) for note in notes):
            continue
        assert prompt != without or item.get("type") in SETTINGS or notes, item
        for path, part in parts_in(item, at):
            is_reported = any(note.startswith(f"{path}:") for note in notes)
            is_read = part["type"] not in MEDIA and any(word in prompt for word in words_in(part))
            assert is_read or is_reported, part


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_takes_the_items_that_a_response_takes(scripted: OpenAI, kind: str) -> None:
    for item in items_of(kind):
        if item.get("type") in (None, REFERENCE):
            kept = scripted.responses.create(**to_play("an answer"))
            item = {"type": REFERENCE, "id": kept.output[-1].id}
        items: Any = [*items_before(item), item]
        prompt, notes = prompt_for(scripted, items)
        created = scripted.conversations.create(items=items)
        report = (created.model_extra or {}).get("unisono", {})
        assert report.get("notes", []) == [note.replace("input.", "items.", 1) for note in notes], item
        assert prompt_for(scripted, [], conversation=created.id)[0] == prompt, item
        added = scripted.conversations.create()
        # The SDK has no type for a trigger in a conversation, where it has no effect.
        if item["type"] == "compaction_trigger":
            scripted.conversations.items.with_raw_response.create(added.id, items=items)
        else:
            scripted.conversations.items.create(added.id, items=items)
        assert prompt_for(scripted, [], conversation=added.id)[0] == prompt, item
