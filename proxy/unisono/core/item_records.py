"""Conversion between items and plain records, for the store and for sealed reasoning.

A record contains only JSON values. An item that is converted to a record and back is equal to the original, including
its exact tokens. If records need a version, their writer has to add it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from unisono.core.conversation import (
    AddedTools,
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    DeveloperMessage,
    FunctionTool,
    Item,
    Json,
    Phase,
    TextGrammar,
    Tokens,
    ToolResult,
    UserMessage,
)

Record = dict[str, Json]


def text_of(record: Record, key: str = "text") -> str:
    """Return the field `key`; raises KeyError if it is missing, TypeError if it is not a string."""
    value = record[key]
    if not isinstance(value, str):
        raise TypeError(key)
    return value


def _tokens(record: Record) -> Tokens:
    return tuple(cast("list[int]", record.get("tokens", ())))


def tool_record(tool: FunctionTool) -> Record:
    """Convert a tool to a record."""
    # Earlier versions of Unisono refuse unknown fields, so newer fields are written only if they have a value.
    more: Record = {"namespace": tool.namespace} if tool.namespace else {}
    if tool.namespace_description:
        more["namespace_description"] = tool.namespace_description
    if tool.kind:
        more["kind"] = tool.kind
    if tool.grammar is not None:
        more["grammar"] = [tool.grammar.syntax, tool.grammar.definition]
    if tool.deferred:
        more["deferred"] = True
    if tool.server:
        more["server"] = tool.server
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": None if tool.parameters is None else dict(tool.parameters),
        "strict": tool.strict,
        "free_text": tool.free_text,
        **more,
    }


def to_tool(record: Record) -> FunctionTool:
    """Convert a record to a tool. Raises KeyError or TypeError if the record is invalid."""
    parameters = record["parameters"]
    if not isinstance(parameters, dict | None):
        raise TypeError("parameters")
    return FunctionTool(
        text_of(record, "name"),
        text_of(record, "description"),
        parameters,
        bool(record["strict"]),
        bool(record["free_text"]),
        text_of(record, "namespace") if "namespace" in record else "",
        text_of(record, "namespace_description") if "namespace_description" in record else "",
        text_of(record, "kind") if "kind" in record else "",
        _grammar(record.get("grammar")),
        record.get("deferred") is True,
        text_of(record, "server") if "server" in record else "",
    )


def _grammar(value: Json) -> TextGrammar | None:
    match value:
        case None:
            return None
        case ["regex" | "lark" as syntax, str(definition)]:
            return TextGrammar(syntax, definition)
        case _:
            raise TypeError("grammar")


def _added_tools(record: Record) -> AddedTools:
    tools = record["tools"]
    if not isinstance(tools, list):
        raise TypeError("tools")
    return AddedTools(tuple(to_tool(cast("Record", tool)) for tool in tools))


# Kind name and reader for each type of item.
MESSAGE_KINDS: Mapping[str, tuple[type[Item], Callable[[Record], Item]]] = {
    "user": (UserMessage, lambda r: UserMessage(text_of(r))),
    "developer": (DeveloperMessage, lambda r: DeveloperMessage(text_of(r))),
    "reasoning": (AssistantReasoning, lambda r: AssistantReasoning(text_of(r), _tokens(r))),
    "message": (AssistantMessage, lambda r: AssistantMessage(text_of(r), Phase(text_of(r, "phase")), _tokens(r))),
    "call": (
        AssistantCall,
        lambda r: AssistantCall(text_of(r, "call_id"), text_of(r, "name"), text_of(r, "arguments"), _tokens(r)),
    ),
    "result": (ToolResult, lambda r: ToolResult(text_of(r, "call_id"), text_of(r, "name"), text_of(r, "output"))),
    "tools": (AddedTools, _added_tools),
}

KIND = {kind: name for name, (kind, _) in MESSAGE_KINDS.items()}


def to_record(item: Item) -> Record:
    record: Record = {"kind": KIND[type(item)]}
    if isinstance(item, AddedTools):
        return {**record, "tools": [tool_record(tool) for tool in item.tools]}
    for key in type(item).__slots__:
        value = getattr(item, key)
        if key != "tokens":
            record[key] = value
        elif value:
            record[key] = list(value)
    return record


def to_item(record: Record) -> Item:
    """Convert a record to an item.

    Raises KeyError, TypeError, ValueError or AttributeError if the record is invalid.
    """
    return MESSAGE_KINDS[text_of(record, "kind")][1](record)
