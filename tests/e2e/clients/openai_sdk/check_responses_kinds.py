"""Every kind of input item that the SDK declares, before the newest message: accepted, and read or reported.

The table is made from the SDK's types, so that a new kind fails here first.
"""

from __future__ import annotations

import collections.abc
import types
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin

import pytest
from openai import OpenAI
from openai.types.responses import ResponseInputItemParam
from openai_sdk.responding import to_play
from typing_extensions import get_type_hints, is_typeddict

Json = dict[str, Any]
WORD = "porcelain"
# One id for all, so that results and approvals find their calls.
ID = "call_1"
IDS = ("id", "call_id", "approval_request_id")
# Kinds that change a setting, and kinds that repeat what the request contains already.
SETTINGS = ("configuration_update", "compaction_trigger", "mcp_list_tools", "mcp_approval_response")
# The item before an item of a kind, which cannot stand alone.
BEFORE = {
    "mcp_approval_response": "mcp_approval_request",
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
}
KINDS = {kind.__name__: kind for kind in get_args(ResponseInputItemParam)}


def example(annotation: Any, name: str = "") -> Any:
    """Return a value of a type, with only the required fields."""
    origin = get_origin(annotation)
    if is_typeddict(annotation):
        # `__required_keys__` is empty for types whose annotations are strings.
        hints = get_type_hints(annotation, include_extras=True)
        return {field: example(hint, field) for field, hint in hints.items() if get_origin(hint) is Required}
    if origin in (Required, NotRequired):
        return example(get_args(annotation)[0], name)
    if origin is Literal:
        return get_args(annotation)[0]
    if origin in (Union, types.UnionType):
        return example(next(each for each in get_args(annotation) if each is not types.NoneType), name)
    if origin is dict:
        return {}
    if origin is not None and issubclass(origin, collections.abc.Iterable):
        return [example(get_args(annotation)[0], name)]
    if annotation is str or annotation is object:
        return ID if name in IDS else "{}" if name == "arguments" else WORD
    # A strict schema would need content.
    return {bool: False, int: 1, float: 1.0}.get(annotation, {})


def item_of(kind: str) -> Json:
    item: Json = example(KINDS[kind])
    hints = get_type_hints(KINDS[kind])
    # Some kinds have a default type, and ids that their results refer to.
    if "type" in hints:
        item.setdefault("type", example(hints["type"]))
    # A result names its call or its tool.
    if "output" in item and "name" in hints:
        item.setdefault("name", WORD)
    return {"id": ID, **item} if "id" in hints else item


def count(client: OpenAI, items: list[Json]) -> int:
    counted = client.responses.input_tokens.count(model="scripted", input=items)  # type: ignore[arg-type]
    return counted.input_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_item_is_accepted_and_read_or_reported(scripted: OpenAI, kind: str) -> None:
    item = item_of(kind)
    before: list[Json] = []
    if item.get("type") == "item_reference":
        kept = scripted.responses.create(**to_play("an answer"))
        item = {"type": "item_reference", "id": kept.output[-1].id}
    elif (first := BEFORE.get(str(item.get("type")))) is not None:
        before = [item_of(next(name for name in KINDS if item_of(name).get("type") == first))]
    last = to_play("an answer")
    newest = {"role": "user", "content": last.pop("input")}
    response = scripted.responses.create(input=[*before, item, newest], **last)
    assert response.output
    notes = (response.model_extra or {})["unisono"].get("notes", [])
    is_reported = any(note.startswith(f"input.{len(before)}") for note in notes)
    is_read = count(scripted, [*before, item, newest]) > count(scripted, [*before, newest])
    assert is_reported or is_read or item["type"] in SETTINGS
