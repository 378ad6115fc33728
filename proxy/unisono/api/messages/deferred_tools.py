"""Deferred tools of a Messages request, which a search by the client or the gateway finds.

The gateway runs Anthropic's tools `tool_search_tool_*`. In a request without these tools, the client searches. A
`tool_reference` in a tool result then names a tool that the client found.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from unisono.api.client_toolbox import NOT_DEFERRED, Toolbox
from unisono.api.messages.client_tools import client_tool
from unisono.api.messages.schema import CUSTOM, MessagesInput, MessagesTool
from unisono.api.tool_search import BY_PATTERN, BY_WORDS, SearchMethod, tool_search
from unisono.core.conversation import Conversation, FunctionTool
from unisono.core.tool_host import ToolSearch

# Types of searches, with their names and methods.
SEARCHES: Final = (
    (re.compile(r"tool_search_tool_bm25(_\d{8})?"), "tool_search_tool_bm25", BY_WORDS),
    (re.compile(r"tool_search_tool_regex(_\d{8})?"), "tool_search_tool_regex", BY_PATTERN),
)


def _search(tools: Sequence[MessagesTool]) -> tuple[str, SearchMethod] | None:
    """Return the name and the method of the first tool search in `tools`, or None."""
    found = (
        (tool.name or name, method) for tool in tools for types, name, method in SEARCHES if types.fullmatch(tool.type)
    )
    return next(found, None)


def is_search(kind: str) -> bool:
    return any(types.fullmatch(kind) for types, _, _ in SEARCHES)


def is_searched(request: MessagesInput) -> bool:
    """Return whether the request has a tool search that the gateway can run, and tools to find."""
    tools = request.tools or []
    functions = [tool for tool in tools if tool.type == CUSTOM or client_tool(tool.type) is not None]
    is_taken = (search := _search(tools)) is not None and any(tool.name == search[0] for tool in functions)
    return search is not None and not is_taken and any(tool.defer_loading for tool in functions)


def deferred_tools(request: MessagesInput, tools: Sequence[FunctionTool]) -> Mapping[str, FunctionTool]:
    """Return the deferred tools by name. The model sees a deferred tool only after it was found."""
    declared_tools, has_search = request.tools or [], is_searched(request)
    # If the gateway cannot run the declared search, or no tool is deferred, the model must see all tools at once.
    if _search(declared_tools) is not None and not has_search:
        return {}
    names = {tool.name for tool in declared_tools if tool.defer_loading}
    found = {tool.name: tool for tool in tools if tool.name in names}
    # If all tools are deferred, the client has no tool with which the model could search.
    return found if has_search or len(found) < len(tools) else {}


def notes_on_deferred(request: MessagesInput, deferred: Collection[str]) -> Iterator[str]:
    """Yield notes on tools with `defer_loading` that are not in `deferred`."""
    for position, tool in enumerate(request.tools or ()):
        is_function = tool.type == CUSTOM or client_tool(tool.type) is not None
        if tool.defer_loading and is_function and tool.name not in deferred:
            yield f"tools.{position}.defer_loading: {NOT_DEFERRED}"


def server_search(request: MessagesInput, toolbox: Toolbox, removed: Collection[str]) -> ToolSearch | None:
    """Return the gateway's search for deferred tools that are not in `removed`, or None."""
    is_forbidden = request.tool_choice is not None and request.tool_choice.type == "none"
    search = _search(request.tools or []) if is_searched(request) and not is_forbidden else None
    if search is None:
        return None
    deferred = deferred_tools(request, toolbox.tools)
    return tool_search(*search, tuple(tool for name, tool in deferred.items() if name not in removed))


def with_declared(
    request: MessagesInput,
    conversation: Conversation,
    tools: Sequence[FunctionTool],
    deferred: Mapping[str, FunctionTool],
) -> Conversation:
    """Return the conversation with the declared tools in its preamble.

    The field `deferred` of the result contains the deferred tools that no tool search has found so far.
    """
    found = {tool.name for tool in conversation.tools}
    # The model must know a tool that the request requires. A tool that was found stays where it was found, so that the
    # prompt still matches the backend's cache.
    required = request.tool_choice.name if request.tool_choice is not None else None
    hidden = {name for name in deferred if name in found or name != required}
    preamble = replace(conversation.preamble, tools=tuple(tool for tool in tools if tool.name not in hidden))
    waiting = tuple(tool for name, tool in deferred.items() if name in hidden - found)
    return replace(conversation, preamble=preamble, deferred=waiting)
