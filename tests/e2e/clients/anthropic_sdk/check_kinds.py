"""Every kind of message, content block and tool that the SDK declares: accepted, and read or reported.

The table is made from the SDK's types, so that a new kind fails here first. Blocks stand before the newest message.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types import ContentBlockParam, MessageParam, ToolUnionParam
from anthropic.types.beta import BetaContentBlockParam, BetaMessageParam, BetaToolUnionParam
from anthropic.types.beta.beta_system_message_param import ContentBlock as BetaSystemContent
from anthropic.types.beta.beta_tool_result_block_param import Content as BetaResultContent
from anthropic.types.tool_result_block_param import Content as ResultContent
from anthropic_sdk.messaging import WEATHER, scripted_request, text_of
from sdk_types import (
    ID,
    PROMPT,
    WORD,
    Json,
    check_known,
    examples,
    is_typeddict,
    kind_name,
    kind_names,
    members,
    words_in,
)

from conftest import Stage

KNOWN = Path(__file__).with_name("kinds.txt")
CONTENTS = {"content": (ContentBlockParam, BetaContentBlockParam), "result": (ResultContent, BetaResultContent)}
# Names of the blocks by the place that the SDK allows them in.
PLACES = {
    "user": CONTENTS["content"],
    "assistant": CONTENTS["content"],
    "system": (BetaSystemContent,),
    "tool_result": CONTENTS["result"],
}
MESSAGES = {kind.__name__: kind for union in (MessageParam, BetaMessageParam) for kind in members(union)}
TOOLS = {kind.__name__: kind for union in (ToolUnionParam, BetaToolUnionParam) for kind in members(union)}
# Kinds with results of tools, and the call that they answer.
CALLS = {"tool_result": "tool_use", "mcp_tool_result": "mcp_tool_use"}
TOOL_USE: Json = {"type": "tool_use", "id": ID, "name": WORD, "input": {}}
QUESTION: Json = {"role": "user", "content": "Hello"}
# Fields that are no content: settings, ids, schemas, and what only the server of the block can read. The text of a
# citation is also in the block that it cites.
SILENT = ("cache_control", "caller", "citations", "encrypted_content", "input_schema", "signature", "tool_use_id", "id")
# The line that a model reads in place of a file in a result of a server tool.
REMOVED = "[File removed here"


def kinds_of(place: str) -> dict[str, list[Any]]:
    """Return the types of each kind of block in a place."""
    found: dict[str, list[Any]] = {}
    # The SDK's content may also be a block of an answer, which is no typed dictionary.
    for kind in (each for union in PLACES[place] for each in members(union) if is_typeddict(each)):
        found.setdefault(kind_name(kind), []).append(kind)
    return found


KINDS = {(place, kind): types for place in PLACES for kind, types in kinds_of(place).items()}


def labelled(value: Any, position: list[int]) -> Any:
    """Return an example in which every text is different."""
    if isinstance(value, dict):
        return {name: labelled(each, position) for name, each in value.items()}
    if isinstance(value, list):
        return [labelled(each, position) for each in value]
    if value != WORD:
        return value
    position[0] += 1
    return f"{WORD}{position[0]:03}"


def examples_of(types: list[Any]) -> list[Json]:
    """Return different examples of the types, with the required fields and with all fields."""
    found = [example for kind in types for full in (False, True) for example in examples(kind, full=full)]
    return [labelled(each, [0]) for place, each in enumerate(found) if each not in found[:place]]


def content_of(value: Any) -> Any:
    """Return a value without the fields that are no content."""
    if isinstance(value, list):
        return [content_of(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: content_of(each) for name, each in value.items() if name not in SILENT}


def typed_parts(value: Any, path: str) -> Iterator[tuple[str, Json]]:
    """Yield a block and all objects with a type inside of it, with their positions."""
    if isinstance(value, dict) and "type" in value:
        yield path, value
    if isinstance(value, dict | list):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from typed_parts(each, f"{path}.{name}")


def placed(place: str, block: Json) -> tuple[list[Json], str]:
    """Return messages with a block in a place, and the position of the block."""
    if place == "tool_result":
        result = {"type": "tool_result", "tool_use_id": ID, "content": [block]}
        return [QUESTION, {"role": "assistant", "content": [TOOL_USE]}, {"role": "user", "content": [result]}], (
            "messages.2.content.0.content.0"
        )
    kind = block["type"]
    is_result = kind.endswith("_result") and kind != "search_result"
    calls = [{**TOOL_USE, "type": CALLS.get(kind, "server_tool_use")}] if is_result else []
    if place == "assistant":
        return [QUESTION, {"role": place, "content": [*calls, block]}], f"messages.1.content.{len(calls)}"
    before = [QUESTION, {"role": "assistant", "content": calls}] if calls else []
    return [*before, {"role": place, "content": [block]}], f"messages.{len(before)}.content.0"


def prompt_for(client: Anthropic, messages: list[Json], **more: Any) -> tuple[str, list[str]]:
    """Return the prompt that a model reads for messages before a newest one, and the positions in the notes."""
    fields = scripted_request(PROMPT, **more)
    message: Any = client.messages.create(**{**fields, "messages": [*messages, *fields["messages"]]})
    return text_of(message), [note.partition(":")[0] for note in message.model_extra["unisono"].get("notes", [])]


def servers_of(tool: Json, stage: Stage) -> Json:
    """Return the field with the server of a toolset, which it names; the field is not in the types of `messages`."""
    if tool["type"] != "mcp_toolset":
        return {}
    tool["mcp_server_name"] = "docs"
    servers = [{"type": "url", "name": "docs", "url": stage.tools["docs"]}]
    return {"extra_body": {"temperature": 0, "mcp_servers": servers}}


def is_reported(notes: list[str], path: str) -> bool:
    """Return whether a note is on a position, on a field in it, or on the whole that it belongs to."""
    return any(f"{note}.".startswith(f"{path}.") or f"{path}.".startswith(f"{note}.") for note in notes)


def test_every_kind_is_known() -> None:
    names = [name for role in (MessageParam, BetaMessageParam) for name in kind_names(role, "message", 0)]
    for place, unions in {**CONTENTS, "system": PLACES["system"]}.items():
        names += [name for union in unions for name in kind_names(union, place, 3, in_fields=True)]
    names += [name for union in (ToolUnionParam, BetaToolUnionParam) for name in kind_names(union, "tool", 0)]
    check_known(names, KNOWN)


@pytest.mark.parametrize(("place", "kind"), KINDS, ids=[f"{kind} in {place}" for place, kind in KINDS])
def test_a_kind_of_block_is_accepted_and_read_or_reported(scripted: Anthropic, place: str, kind: str) -> None:
    for block in examples_of(KINDS[place, kind]):
        messages, at = placed(place, block)
        prompt, notes = prompt_for(scripted, messages)
        for path, part in typed_parts(content_of(block), at):
            words = words_in(part)
            is_read = any(word in prompt for word in words) or (path != at and REMOVED in prompt)
            # A part of numbers alone belongs to a block that is read. A result without content is an empty one.
            is_bare = not words and (path != at or f"{WORD} to=" in prompt)
            assert is_read or is_bare or is_reported(notes, path), (path, block, prompt)


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_kind_of_message_is_accepted_and_read_or_reported(scripted: Anthropic, kind: str) -> None:
    for message in examples_of([MESSAGES[kind]]):
        content = message.get("content", "")
        # The test above has the blocks.
        message |= {"content": WORD} if isinstance(content, list) else {}
        prompt, notes = prompt_for(scripted, [QUESTION, message])
        assert not content or WORD in prompt, message
        settings = [name for name in message if name not in ("role", "content")]
        assert all(is_reported(notes, f"messages.1.{name}") for name in settings), message


@pytest.mark.parametrize("kind", TOOLS)
def test_a_kind_of_tool_beside_a_function_is_declared_or_reported(scripted: Anthropic, stage: Stage, kind: str) -> None:
    for tool in examples_of([TOOLS[kind]]):
        prompt, notes = prompt_for(scripted, [], tools=[WEATHER, tool], **servers_of(tool, stage))
        alone, _ = prompt_for(scripted, [], tools=[WEATHER])
        assert "get_weather" in prompt
        assert prompt != alone or is_reported(notes, "tools.1"), tool
