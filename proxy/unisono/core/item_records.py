"""Items as plain records and back, for whoever keeps or carries them: the store, and sealed reasoning.

A record holds only what JSON holds, and a round trip gives an equal item, its exact tokens included. What such records
are wrapped in, a version above all, is for those who write them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from unisono.core.conversation import (
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    DeveloperMessage,
    Item,
    Json,
    Phase,
    Tokens,
    ToolResult,
    UserMessage,
)

Record = dict[str, Json]


def text_of(record: Record, key: str = "text") -> str:
    """Raises KeyError, TypeError."""
    value = record[key]
    if not isinstance(value, str):
        raise TypeError(key)
    return value


def _tokens(record: Record) -> Tokens:
    return tuple(cast("list[int]", record.get("tokens", ())))


SAID: Mapping[str, tuple[type[Item], Callable[[Record], Item]]] = {
    "user": (UserMessage, lambda r: UserMessage(text_of(r))),
    "developer": (DeveloperMessage, lambda r: DeveloperMessage(text_of(r))),
    "reasoning": (AssistantReasoning, lambda r: AssistantReasoning(text_of(r), _tokens(r))),
    "message": (AssistantMessage, lambda r: AssistantMessage(text_of(r), Phase(text_of(r, "phase")), _tokens(r))),
    "call": (
        AssistantCall,
        lambda r: AssistantCall(text_of(r, "call_id"), text_of(r, "name"), text_of(r, "arguments"), _tokens(r)),
    ),
    "result": (ToolResult, lambda r: ToolResult(text_of(r, "call_id"), text_of(r, "name"), text_of(r, "output"))),
}
"""How each item of a conversation is named in a record, and read from one."""

KIND = {kind: name for name, (kind, _) in SAID.items()}


def to_record(item: Item) -> Record:
    record: Record = {"kind": KIND[type(item)]}
    for key in type(item).__slots__:
        value = getattr(item, key)
        if key != "tokens":
            record[key] = value
        elif value:
            record[key] = list(value)
    return record


def to_item(record: Record) -> Item:
    """Raises KeyError, TypeError, ValueError or AttributeError for what is no record of an item."""
    return SAID[text_of(record, "kind")][1](record)
