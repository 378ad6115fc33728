"""Deferred tools of a Responses request, and the gateway's search for them.

A tool is deferred in `tools`, or in an `additional_tools` item. A search needs something to find. Without deferred
tools, or if a tool of the client has its name, all tools are declared from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unisono.api.responses.declared_tools import ResponsesTool, Searcher, notes_on_searches, searcher_of
from unisono.api.responses.input_items import InputAddedTools, InputSearchOutput
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.tool_choice import FUNCTIONS, client_tool_name
from unisono.api.tool_search import BY_WORDS, tool_search
from unisono.api.tools import PLAIN_NAMESPACE, TOOL_SEARCH, Toolbox
from unisono.core.conversation import AddedTools, Conversation, FunctionTool, Item
from unisono.core.tools import ToolSearch


@dataclass(frozen=True, slots=True)
class DeferredTools:
    """Deferred tools by name.

    `search` finds them; None if the gateway does not search. `required` are names in `tool_choice`.
    """

    tools: Mapping[str, FunctionTool] = field(default_factory=dict)
    search: ToolSearch | None = None
    required: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def hidden(self, history: Sequence[Item]) -> frozenset[str]:
        """Return the names of the tools that are not declared where the request has them."""
        # The model must know a required tool. One that was found stays where it was found, for the cached prompt.
        added = (tool for item in history if isinstance(item, AddedTools) for tool in item.tools)
        found = {tool.name for tool in added if not tool.deferred}
        return frozenset(name for name in self.tools if name in found or name not in self.required)

    def added_to(self, conversation: Conversation) -> Conversation:
        """Return the conversation with the deferred tools that it does not have yet."""
        known = {tool.name for tool in conversation.tools}
        return replace(conversation, deferred=tuple(tool for name, tool in self.tools.items() if name not in known))


def without(history: Sequence[Item], names: frozenset[str]) -> list[Item]:
    """Return the history without the deferred tools of these names."""
    items: list[Item] = []
    for item in history:
        if isinstance(item, AddedTools):
            item = AddedTools(tuple(tool for tool in item.tools if not (tool.deferred and tool.name in names)))
        if not isinstance(item, AddedTools) or item.tools:
            items.append(item)
    return items


def request_searcher(request: ResponsesRequest) -> Searcher | None:
    """Return who searches for the deferred tools of a request."""
    return searcher_of([tool for _, tool in _tools(request)])


def deferred_tools(
    request: ResponsesRequest, toolbox: Toolbox, history: Sequence[Item], searcher: Searcher | None
) -> DeferredTools:
    """Return the deferred tools of `toolbox` and of the history; `searcher` searches for them."""
    added = (tool for item in history if isinstance(item, AddedTools) for tool in item.tools)
    # An earlier response may have been given the search and its tools in an item.
    earlier = {tool.name: tool for tool in added if tool.deferred}
    tools = toolbox.tools if searcher is Searcher.GATEWAY or (searcher is None and earlier) else ()
    deferred = earlier | {tool.name: tool for tool in tools if tool.deferred}
    if not deferred:
        return DeferredTools(notes=tuple(notes_on_searches(_tools(request))))
    search = None
    if searcher is not Searcher.CLIENT and not request.has_no_calls:
        search = tool_search(TOOL_SEARCH, BY_WORDS, tuple(deferred.values()), _namespaces(request))
    known = {name: replace(tool, deferred=False) for name, tool in deferred.items()}
    return DeferredTools(known, search, _required(request, toolbox.with_added(history)))


def _required(request: ResponsesRequest, toolbox: Toolbox) -> frozenset[str]:
    """Return the names in `tool_choice`; none if the model may search for the tools."""
    choice = request.tool_choice
    named = (choice.tools if choice is not None else None) or ()
    if any(tool.kind == TOOL_SEARCH for tool in named):
        return frozenset()
    return frozenset(client_tool_name(tool, toolbox) for tool in named if tool.kind in FUNCTIONS)


def _tools(request: ResponsesRequest) -> Iterator[tuple[str, ResponsesTool]]:
    """Yield the tools that the request declares, each with its field."""
    yield from ((f"tools.{place}", tool) for place, tool in enumerate(request.tools or ()))
    for position, item in enumerate(request.input):
        if isinstance(item, InputAddedTools) and not isinstance(item, InputSearchOutput):
            yield from ((f"input.{position}.tools.{place}", tool) for place, tool in enumerate(item.tools))


def _namespaces(request: ResponsesRequest) -> Mapping[str, str]:
    """Return the descriptions of the namespaces by name."""
    return {
        tool.name: str((tool.model_extra or {}).get("description") or "")
        for _, tool in _tools(request)
        if tool.type == "namespace" and tool.name and tool.name != PLAIN_NAMESPACE
    }
