"""Deferred tools of a Responses request, and the gateway's search for them.

The model sees a deferred tool only after a search has found it. Tools are deferred in `tools` or in an
`additional_tools` item; an MCP server in `tools` defers all of its tools. The gateway does not search if no tool is
deferred, or if a tool of the client is named `tool_search`. All tools are then declared from the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from unisono.api.client_toolbox import PLAIN_NAMESPACE, TOOL_SEARCH, Toolbox
from unisono.api.responses.declared_tools import ResponsesTool, Searcher, notes_on_searches, searcher_of
from unisono.api.responses.input_items import InputAddedTools, InputItem, InputSearchOutput
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.responses.server_tools.mcp_spec import McpSpec
from unisono.api.tool_choice import FUNCTIONS, SERVER, NamedTool, client_tool_name
from unisono.api.tool_search import BY_WORDS, tool_search, with_search
from unisono.core.conversation import AddedTools, Conversation, FunctionTool, Item
from unisono.core.frozen import dataclass
from unisono.core.tool_host import ToolSearch, ToolServer
from unisono.engine.request import ServerTools


@dataclass(frozen=True, slots=True)
class DeferredTools:
    """Deferred tools by name.

    `search` is the gateway's search for these tools; None if the gateway does not search. `required` and
    `required_servers` are the tool names and the server labels in `tool_choice`.
    """

    tools: Mapping[str, FunctionTool] = field(default_factory=dict)
    search: ToolSearch | None = None
    required: frozenset[str] = frozenset()
    required_servers: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def hidden(self, history: Sequence[Item]) -> frozenset[str]:
        """Return the names of the deferred tools that must not be declared at the start."""
        # A required tool is declared from the start. A tool that was found is declared only where it was found, so that
        # the backend's prefix cache still matches the prompt.
        found = {tool.name for tool in _added_tools(history) if not tool.deferred}
        return frozenset(name for name in self.tools if name in found or name not in self.required)

    def searched(self, server_tools: ServerTools | None, request: ResponsesRequest) -> ServerTools | None:
        """Add the gateway's search to the server tools. It also finds tools of deferred servers."""
        if self.search is None:
            return server_tools
        server_tools = server_tools or ServerTools(max_calls=request.max_tool_calls)
        servers = tuple(
            replace(server, deferred=server.deferred and server.label not in self.required_servers)
            for server in server_tools.servers
        )
        return with_search(replace(server_tools, servers=servers), self.search)

    def added_to(self, conversation: Conversation) -> Conversation:
        """Return the conversation with all deferred tools that it does not declare yet."""
        if not self.tools:
            return conversation
        known = {tool.name for tool in conversation.tools}
        return replace(conversation, deferred=tuple(tool for name, tool in self.tools.items() if name not in known))


def without(history: Sequence[Item], names: frozenset[str]) -> list[Item]:
    """Remove the deferred tools with these names from the history, and items that become empty."""
    items: list[Item] = []
    for item in history:
        if isinstance(item, AddedTools):
            item = AddedTools(tuple(tool for tool in item.tools if not (tool.deferred and tool.name in names)))
        if not isinstance(item, AddedTools) or item.tools:
            items.append(item)
    return items


def replacing_tools(toolbox: Toolbox, searcher: Searcher | None) -> Mapping[str, FunctionTool]:
    """Return the tools of a request that replace equally named tools in the history, by name.

    Deferred tools are omitted if the client searches, because the result of the search defines the tools it found.
    """
    return {tool.name: tool for tool in toolbox.tools if not (tool.deferred and searcher is Searcher.CLIENT)}


def with_replaced(history: Sequence[Item], tools: Mapping[str, FunctionTool]) -> tuple[Item, ...]:
    """Return the history; `tools` replace equally named tools that the client runs."""

    def newest(tool: FunctionTool) -> FunctionTool:
        current = None if tool.server else tools.get(tool.name)
        return tool if current is None else replace(current, deferred=tool.deferred and current.deferred)

    return tuple(
        AddedTools(tuple(map(newest, item.tools))) if isinstance(item, AddedTools) else item for item in history
    )


def request_searcher(request: ResponsesRequest, earlier: Sequence[Item]) -> Searcher | None:
    """Return the searcher of the deferred tools; None if neither request nor `earlier` has one."""
    return searcher_of([tool for _, tool in _tools(request)]) or _earlier_searcher(earlier)


def items_searcher(items: Sequence[InputItem], earlier: Sequence[Item]) -> Searcher | None:
    """Return the searcher for deferred tools in new items; None if there is no search."""
    return searcher_of([tool for _, tool in _tools_in(items, "items")]) or _earlier_searcher(earlier)


def _earlier_searcher(earlier: Sequence[Item]) -> Searcher | None:
    tools = [*_added_tools(earlier)]
    if any(tool.kind == TOOL_SEARCH for tool in tools):
        return Searcher.CLIENT
    # A tool is stored as deferred only if there is a search. A search by the gateway is not stored itself.
    return Searcher.GATEWAY if any(tool.deferred for tool in tools) else None


def _added_tools(history: Sequence[Item]) -> Iterator[FunctionTool]:
    return (tool for item in history if isinstance(item, AddedTools) for tool in item.tools)


def deferred_tools(
    request: ResponsesRequest,
    toolbox: Toolbox,
    history: Sequence[Item],
    searcher: Searcher | None,
    servers: Sequence[ToolServer] = (),
) -> DeferredTools:
    """Return the deferred tools of a request; `searcher` is the component that finds them."""
    # An item of an earlier request may have declared the search and its tools.
    earlier = {tool.name: tool for tool in _added_tools(history) if tool.deferred}
    is_searched = searcher is Searcher.GATEWAY or (searcher is None and bool(earlier))
    has_search = is_searched or searcher is Searcher.CLIENT
    deferred = earlier | {tool.name: tool for tool in toolbox.tools if tool.deferred and has_search}
    waiting = {server.label: server.description for server in servers if server.deferred}
    notes = () if is_searched else tuple(notes_on_deferred_servers(request))
    if not deferred and not (waiting and is_searched):
        return DeferredTools(notes=(*notes_on_searches(_tools(request)), *notes))
    search = None
    if searcher is not Searcher.CLIENT and not request.has_no_calls:
        about = {**_namespaces(deferred.values()), **waiting}
        search = tool_search(TOOL_SEARCH, BY_WORDS, tuple(deferred.values()), about)
    known = {name: replace(tool, deferred=False) for name, tool in deferred.items()}
    required = _required(request)
    return DeferredTools(
        known,
        search,
        frozenset(client_tool_name(tool, toolbox.with_added(history)) for tool in required if tool.kind in FUNCTIONS),
        frozenset(tool.server for tool in required if tool.kind == SERVER),
        notes,
    )


def _required(request: ResponsesRequest) -> Sequence[NamedTool]:
    """Return the tools in `tool_choice`; none if the model may search for the tools."""
    choice = request.tool_choice
    named = (choice.tools if choice is not None else None) or ()
    return () if any(tool.kind == TOOL_SEARCH for tool in named) else named


def notes_on_deferred_servers(request: ResponsesRequest) -> Iterator[str]:
    """Yield notes on MCP servers whose `defer_loading` has no effect."""
    for path, tool in _tools(request):
        if isinstance(tool.spec, McpSpec) and tool.spec.defer_loading:
            yield (
                f"{path}.defer_loading: no effect, because the gateway does not search for tools in this request; "
                "add a 'tool_search' tool without 'execution: client', and give no other tool that name"
            )


def _tools(request: ResponsesRequest) -> Iterator[tuple[str, ResponsesTool]]:
    """Yield the tools that the request declares, each with its field."""
    yield from ((f"tools.{place}", tool) for place, tool in enumerate(request.tools or ()))
    yield from _tools_in(request.input, "input")


def _tools_in(items: Sequence[InputItem], param: str) -> Iterator[tuple[str, ResponsesTool]]:
    """Yield the tools that items declare, each with its field; `param` is the items' field."""
    for position, item in enumerate(items):
        if isinstance(item, InputAddedTools) and not isinstance(item, InputSearchOutput):
            yield from ((f"{param}.{position}.tools.{place}", tool) for place, tool in enumerate(item.tools))


def _namespaces(tools: Iterable[FunctionTool]) -> Mapping[str, str]:
    """Return the description of each namespace of deferred tools, by the name of the namespace."""
    # The descriptions are read from the tools instead of the request. The request may continue a conversation in which
    # an item declared the tools, and the prompt must stay the same.
    return {tool.namespace: tool.namespace_description for tool in tools if tool.namespace not in ("", PLAIN_NAMESPACE)}
