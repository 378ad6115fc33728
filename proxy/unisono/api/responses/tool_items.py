"""Conversion of `input` items that declare tools, search for them, or contain found tools."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import orjson

from unisono.api.responses.declared_tools import (
    Searcher,
    declared,
    notes_on_searches,
    searcher_of,
    tools_on_server,
)
from unisono.api.responses.input_conversion import InputConversion
from unisono.api.responses.input_items import InputAddedTools, InputItem, InputSearchCall, InputSearchOutput
from unisono.api.responses.items import served_call
from unisono.api.tool_search import found_text
from unisono.api.tools import TOOL_SEARCH, to_toolbox
from unisono.core.conversation import AddedTools, AssistantCall, FunctionTool, Item, ToolResult


def read_added_tools(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    """Convert an item that declares tools."""
    return _added_tools(conversion, item, param)


def _added_tools(
    conversion: InputConversion, item: InputItem, param: str, servers: Collection[int] = ()
) -> tuple[AddedTools, ...]:
    """Convert the tools that an item declares.

    `servers` are the 0-based positions of the MCP servers among these tools; they are skipped.
    """
    assert isinstance(item, InputAddedTools)
    # Tools that a search has found are no longer deferred.
    searcher = None if isinstance(item, InputSearchOutput) else searcher_of(item.tools) or conversion.searcher
    at = f"{param}.tools"
    without = {f"{at}.{place}" for place in servers}
    tools_of_item = declared(item.tools, at)
    toolbox = to_toolbox((tool for tool in tools_of_item if tool.path not in without), others=True, are_sent_again=True)
    conversion.notes.extend(toolbox.notes)
    tools = toolbox.tools
    if searcher is None:
        tools = tuple(replace(tool, deferred=False) for tool in tools)
    # The deferred tools may be declared in the request's `tools`. The request then has its own notes on the search.
    if conversion.searcher is not Searcher.GATEWAY and not any(tool.deferred for tool in tools):
        conversion.notes.extend(
            notes_on_searches((f"{param}.tools.{place}", tool) for place, tool in enumerate(item.tools))
        )
    return (AddedTools(tools),) if tools else ()


def read_search_call(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    """Convert a call of the tool search. The next search output belongs to this call."""
    assert isinstance(item, InputSearchCall)
    stored = conversion.known.stored_item(item.id) if item.id else None
    if stored is not None and stored.meaning and stored.wire.get("arguments") == item.arguments:
        conversion.search = next((each.call_id for each in stored.meaning if isinstance(each, AssistantCall)), "")
        return stored.meaning
    # If the call has no id, its result is the next search output.
    conversion.search = item.call_id or (served_call(item.id, item.type) if item.id else conversion.unnamed(param))
    arguments = item.arguments if isinstance(item.arguments, str) else orjson.dumps(item.arguments or {}).decode()
    return (AssistantCall(conversion.search, TOOL_SEARCH, arguments),)


def read_search_output(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    """Convert the result of a tool search, and declare the tools that it contains."""
    assert isinstance(item, InputSearchOutput)
    # Only a search that the gateway ran can find tools of MCP servers. Such a search has no `call_id`.
    found = {} if item.call_id else {place: tools_on_server(tool) for place, tool in enumerate(item.tools)}
    added = _added_tools(conversion, item, param, [place for place, tools in found.items() if tools])
    on_servers = tuple(
        FunctionTool(conversion.hosted_name(label, name), server=label)
        for tools in found.values()
        for label, name in tools
    )
    if on_servers:
        added = (AddedTools(tuple(tool for each in added for tool in each.tools) + on_servers),)
    # A search that the gateway ran has no `call_id`; its result belongs to the last search call.
    call_id, conversion.search = item.call_id or conversion.search, ""
    if not call_id or not conversion.history.has_call(call_id):
        return added
    stored = conversion.known.stored_item(item.id) if item.id else None
    names = [tool.name for each in added for tool in each.tools]
    # The model may have read an error, or the names in a different order. Only the stored item contains this text.
    if stored is not None and _is_same_result(stored.meaning, call_id, names):
        return stored.meaning
    return (ToolResult(call_id, TOOL_SEARCH, found_text(names)), *added)


def _is_same_result(meaning: Sequence[Item], call_id: str, names: Sequence[str]) -> bool:
    """Return whether a stored result belongs to the call, and found the same tools."""
    answered = [item.call_id for item in meaning if isinstance(item, ToolResult)]
    found = [tool.name for item in meaning if isinstance(item, AddedTools) for tool in item.tools]
    return answered == [call_id] and sorted(found) == sorted(names)
