"""Items on the wire and items of a conversation, both ways, and both together as they are kept.

A kept item has an id, the form it is shown in (OpenAI's; a dialect may change it on the way out) and what it says to
the model, with the exact tokens the model generated. Ids are new for every item that is kept: what a client calls an
item is only used to find it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

from unisono.api.tools import CallForm, Toolbox, unwrap_input
from unisono.core.conversation import (
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    DeveloperMessage,
    Item,
    Phase,
    ToolResult,
    UserMessage,
)
from unisono.core.events import Closed, HostedCall, Listing, Reasoning, Text, ToolCall
from unisono.core.state_store import StoredItem

NewId = Callable[[str], str]
"""An unguessable id that begins with the given prefix."""

Wire = dict[str, Any]

PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "mcp_call": "mcp_",
    "mcp_list_tools": "mcpl_",
    "mcp_approval_request": "mcpr_",
    "mcp_approval_response": "mcpa_",
    "web_search_call": "ws_",
    "file_search_call": "fs_",
    "code_interpreter_call": "ci_",
    "compaction": "cmp_",
}
"""How the id of an item begins, by its type."""
OTHER_PREFIX = "item_"

PHASES = {Phase.COMMENTARY: "commentary", Phase.FINAL: "final_answer"}
SPOKEN = {"commentary": Phase.COMMENTARY}
"""Phases clients send back; anything else is an answer."""

COMPLETED, INCOMPLETE, IN_PROGRESS, FAILED = "completed", "incomplete", "in_progress", "failed"


def prefix_of(kind: str) -> str:
    return PREFIXES.get(kind, OTHER_PREFIX)


# -- parts


def text_part(text: str) -> Wire:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def annotated(part: Wire, annotations: Sequence[Wire]) -> Wire:
    """A part with what its text refers to."""
    return part | {"annotations": list(annotations)} if annotations else part


def refusal_part(text: str) -> Wire:
    return {"type": "refusal", "refusal": text}


def reasoning_part(text: str) -> Wire:
    return {"type": "reasoning_text", "text": text}


# -- items the model makes


def message(item_id: str, phase: Phase, parts: Sequence[Wire], status: str) -> Wire:
    return {
        "id": item_id,
        "type": "message",
        "status": status,
        "role": "assistant",
        "phase": PHASES[phase],
        "content": list(parts),
    }


def reasoning(item_id: str, parts: Sequence[Wire], status: str, sealed: str | None = None) -> Wire:
    item = {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": list(parts)}
    return item if sealed is None else item | {"encrypted_content": sealed}


def call(item_id: str, call_id: str, name: str, arguments: str, toolbox: Toolbox, status: str) -> Wire:
    """A call in the form its tool was declared in. `name` is the one the model knows; `arguments` are the model's."""
    namespace, own_name = toolbox.origins.get(name, (None, name))
    origin = {"namespace": namespace} if namespace is not None else {}
    if toolbox.form_of(name) is CallForm.CUSTOM:
        kind, said = "custom_tool_call", {"input": unwrap_input(arguments)}
    else:
        kind, said = "function_call", {"arguments": arguments}
    return {"id": item_id, "type": kind, "status": status, "call_id": call_id, "name": own_name, **said, **origin}


def to_said(closed: Closed) -> Item | None:
    """A finished item as it stands in the conversation from now on; None for a call that was cut: nobody answers it."""
    match closed.item:
        case Reasoning():
            return AssistantReasoning(closed.text, closed.tokens)
        case Text():
            return AssistantMessage(closed.text, closed.item.phase, closed.tokens)
        case ToolCall():
            if not closed.complete:
                return None
            return AssistantCall(closed.item.call_id, closed.item.name, closed.text, closed.tokens)
        case HostedCall():
            if closed.item.approval:
                return None
            return AssistantCall(closed.item.call_id, closed.item.name, closed.text, closed.tokens)
        case Listing():
            return None
        case _:
            assert_never(closed.item)


# -- any item of a conversation


def to_wire(item: Item, item_id: str, toolbox: Toolbox) -> Wire:
    """How an item is shown that is known only by what it says."""
    match item:
        case UserMessage() | DeveloperMessage():
            role = "user" if isinstance(item, UserMessage) else "developer"
            part = {"type": "input_text", "text": item.text}
            return {"id": item_id, "type": "message", "status": COMPLETED, "role": role, "content": [part]}
        case AssistantReasoning():
            return reasoning(item_id, [reasoning_part(item.text)] if item.text else [], COMPLETED)
        case AssistantMessage():
            return message(item_id, item.phase, [text_part(item.text)], COMPLETED)
        case AssistantCall():
            return call(item_id, item.call_id, item.name, item.arguments, toolbox, COMPLETED)
        case ToolResult():
            custom = toolbox.form_of(item.name) is CallForm.CUSTOM
            kind = "custom_tool_call_output" if custom else "function_call_output"
            return {
                "id": item_id,
                "type": kind,
                "status": COMPLETED,
                "call_id": item.call_id,
                "output": item.output,
            }
        case _:
            assert_never(item)


def kind_of(item: Item, toolbox: Toolbox) -> str:
    """The wire type of an item of a conversation."""
    return str(to_wire(item, "", toolbox)["type"])


def to_stored(item: Item, new_id: NewId, toolbox: Toolbox) -> StoredItem:
    """Keep an item that is known only by what it says."""
    item_id = new_id(prefix_of(kind_of(item, toolbox)))
    return StoredItem(item_id, (item,), to_wire(item, item_id, toolbox))


def said_by(items: Sequence[StoredItem]) -> tuple[Item, ...]:
    """What kept items say to the model, in order."""
    return tuple(said for item in items for said in item.said)


def to_listing(
    items: Sequence[StoredItem], *, has_more: bool, show: Callable[[Mapping[str, Any]], Wire] = dict
) -> Wire:
    """A page of items, as `input_items` and the items of a conversation are listed. `show` is the dialect's."""
    return {
        "object": "list",
        "data": [show(item.shown) for item in items],
        "first_id": items[0].id if items else None,
        "last_id": items[-1].id if items else None,
        "has_more": has_more,
    }
