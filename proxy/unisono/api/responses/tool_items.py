"""Conversion of `input` items of tools: declarations, searches and results."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import orjson

from unisono.api.client_toolbox import TOOL_SEARCH, to_toolbox
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
from unisono.core.conversation import AddedTools, AssistantCall, FunctionTool, Item, ToolResult
from unisono.core.state_store import StoredItem


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
    is_found = isinstance(item, InputSearchOutput)
    searcher = None if is_found else searcher_of(item.tools) or conversion.searcher
    at = f"{param}.tools"
    without = {f"{at}.{place}" for place in servers}
    tools_of_item = declared(item.tools, at)
    tools_of_client = (tool for tool in tools_of_item if tool.path not in without)
    toolbox = to_toolbox(
        tools_of_client, at=at, others=True, are_sent_again=True, can_defer=is_found or searcher is not None
    )
    conversion.notes.extend(toolbox.notes)
    tools = toolbox.tools
    if searcher is None:
        tools = tuple(replace(tool, deferred=False) for tool in tools)
    # The deferred tools may be declared in the request's `tools`. The request then has its own notes on the search.
    if conversion.searcher is not Searcher.GATEWAY and not any(tool.deferred for tool in tools):
        conversion.notes.extend(
            notes_on_searches((f"{param}.tools.{place}", tool) for place, tool in enumerate(item.tools))
        )
    conversion.notes.extend(
        f"{at}: the definition of '{tool.name}' has no effect, because 'tools' has a different one"
        for tool in tools
        if _is_replaced(tool, conversion.tools.get(tool.name))
    )
    return (AddedTools(tools),) if tools else ()


def _is_replaced(tool: FunctionTool, current: FunctionTool | None) -> bool:
    return current is not None and replace(tool, deferred=current.deferred) != current


def read_search_call(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    """Convert a call to the tool search. The next search output belongs to this call."""
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
    """Return whether a stored search result answers the call and found the tools `names`."""
    answered = [item.call_id for item in meaning if isinstance(item, ToolResult)]
    found = [tool.name for item in meaning if isinstance(item, AddedTools) for tool in item.tools]
    return answered == [call_id] and sorted(found) == sorted(names)


def output_texts(output: Any) -> Iterator[str]:
    """Yield the texts of a tool result: one for each element of a list, otherwise one.

    A result of `shell` is a list with an element for each command.
    """
    yield from map(_text, output if isinstance(output, list) else [output])


def _text(part: Any) -> str:
    match part:
        case None:
            return ""
        case str():
            return part
        case {"stdout": stdout, "stderr": stderr}:
            return "\n".join(str(text) for text in (stdout, stderr, _ending(part.get("outcome"))) if text)
        case _:
            return orjson.dumps(part).decode()


def _ending(outcome: Any) -> str:
    """Describe the failure of a command; return "" if the command succeeded."""
    match outcome:
        case {"type": "exit", "exit_code": int(code)} if code:
            return f"exit code {code}"
        case {"type": "timeout"}:
            return "The command exceeded its time limit."
        case _:
            return ""


def error_text(error: object) -> str:
    """Return the text of an MCP error, which may be a string, an object or other JSON."""
    match error:
        # The pattern `{}` would match every object.
        case empty if not empty:
            return ""
        case str():
            return error
        case {"content": [{"text": str(text)}]} | {"message": str(text)}:
            return text
        case _:
            return orjson.dumps(error).decode()


def is_same_mcp_call(stored: StoredItem, arguments: str, output: str) -> bool:
    """Return True if an MCP call that the client sent back matches the stored call.

    An empty output and reformatted arguments match too, because Pydantic AI sends calls in this form.
    """
    results = [item.output for item in stored.meaning if isinstance(item, ToolResult)]
    return same_json(str(stored.wire.get("arguments")), arguments) and (results == [output] or not output)


def is_same_call(stored: StoredItem, call_id: str | None, details: Any) -> bool:
    """Return whether a returned call of a client's built-in tool matches the stored one."""
    wire = stored.wire
    return wire.get("call_id") == call_id and details in (wire.get("action"), wire.get("operation"))


def same_json(one: str, other: str) -> bool:
    """Return whether two texts are equal, or contain equal JSON."""
    if one == other:
        return True
    try:
        return bool(orjson.loads(one) == orjson.loads(other))
    except orjson.JSONDecodeError:
        return False
