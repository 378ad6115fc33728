"""Deferred tools of a Responses request, and the gateway's search for them.

A search needs something to find. Without deferred tools, beside a search of the client, or if a tool of the client has
its name, all tools are declared from the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from unisono.api.responses.declared_tools import ResponsesTool, declared, is_client_search
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.tool_search import BY_WORDS, tool_search
from unisono.api.tools import PLAIN_NAMESPACE, TOOL_SEARCH, SearchSpec, Toolbox, to_toolbox
from unisono.core.conversation import Conversation, FunctionTool
from unisono.core.tools import ToolSearch

NO_EFFECT: Final = "no effect, because the model sees all tools from the start"


@dataclass(frozen=True, slots=True)
class DeferredTools:
    """Tools that a search may add; `search` is None if nothing is deferred."""

    tools: tuple[FunctionTool, ...] = ()
    search: ToolSearch | None = None
    notes: tuple[str, ...] = ()

    def without(self, tools: tuple[FunctionTool, ...]) -> tuple[FunctionTool, ...]:
        """Return `tools` without the deferred ones."""
        names = {tool.name for tool in self.tools}
        return tuple(tool for tool in tools if tool.name not in names)

    def added_to(self, conversation: Conversation) -> Conversation:
        """Return the conversation with the deferred tools that were not found in it before."""
        known = {tool.name for tool in conversation.tools}
        return replace(conversation, deferred=tuple(tool for tool in self.tools if tool.name not in known))


def deferred_tools(request: ResponsesRequest, toolbox: Toolbox) -> DeferredTools:
    """Return the tools of `toolbox` that the request defers to a search of the server."""
    tools = request.tools or []
    searches = {place: tool for place, tool in enumerate(tools) if isinstance(tool.spec, SearchSpec)}
    hosted = [place for place, tool in searches.items() if not is_client_search(tool)]
    not_deferred = DeferredTools(notes=tuple(f"tools.{place}: {NO_EFFECT}" for place in hosted))
    is_taken = any(tool.name == TOOL_SEARCH for tool in toolbox.tools)
    if request.has_no_calls or not hosted or len(hosted) < len(searches) or is_taken:
        return not_deferred
    known = {tool.name for tool in to_toolbox(declared(tools, "tools", defers=True), others=True).tools}
    # A tool that the request names must be known.
    choice = request.tool_choice
    known |= {tool.name for tool in (choice.tools if choice is not None else None) or ()}
    deferred = tuple(tool for tool in toolbox.tools if tool.name not in known)
    if not deferred:
        return not_deferred
    return DeferredTools(deferred, tool_search(TOOL_SEARCH, BY_WORDS, deferred, _namespaces(tools)))


def _namespaces(tools: list[ResponsesTool]) -> Mapping[str, str]:
    """Return the descriptions of the namespaces by name."""
    return {
        tool.name: str((tool.model_extra or {}).get("description") or "")
        for tool in tools
        if tool.type == "namespace" and tool.name and tool.name != PLAIN_NAMESPACE
    }
