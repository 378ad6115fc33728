"""Server tools of one request: the offers of servers, the names for the model, and look-up.

An offer contains the tools that a server listed at the beginning of the request. The offer applies until the request
ends, even if the server later lists different tools. Offers can be written to a journal and read back. No I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from unisono.core.conversation import (
    AddedTools,
    AssistantCall,
    Builtin,
    Conversation,
    FunctionTool,
    Item,
    Json,
    ToolResult,
)
from unisono.core.frozen import dataclass
from unisono.core.tool_host import (
    FOUND_ON,
    SEARCH_LABEL,
    SEPARATOR,
    HostedTool,
    LeftOutTool,
    ServerToolCall,
    ToolNames,
    ToolOutcome,
    ToolServer,
    found_names,
)
from unisono.engine.journal import NOTED, JournalEntry, parts_of
from unisono.engine.request import ServerTools
from unisono.errors import InvalidRequest
from unisono.harmony.builtin_tools import FUNCTIONS_OF, namespace
from unisono.harmony.tool_declarations import ToolSet, plan_tools

LISTED: Final = "listed"  # key of the note that contains the offers
LEFT_OUT: Final = "tool-left-out"  # rule: some server tools could not be declared
MAX_NOTED_TOOLS: Final = 8  # number of left-out tools per server that the notes list
MAX_NOTED_NAME_CHARS: Final = 64
MAX_NAMES_NEAR: Final = 64  # number of tool names listed in the error reply to an invented name


@dataclass(frozen=True, slots=True)
class ServerOffer:
    """The tools that a server offers; if it could not list its tools, `error` states the reason.

    `left_out` are tools that cannot be offered because of their names.
    """

    server: str
    tools: tuple[HostedTool, ...] = ()
    error: str | None = None
    left_out: tuple[LeftOutTool, ...] = ()


class OfferedServerTools:
    """The server tools that a request offers to the model.

    `client` are the names of the client's own tools. Server tools get different names.
    """

    def __init__(self, server_tools: ServerTools, offers: Sequence[ServerOffer], client: Collection[str]) -> None:
        self.server_tools = server_tools
        self.offers = tuple(offers)
        self._client = frozenset(client)
        # tools that are not offered to the model, by the label of their server; complete after `plan`
        self.left_out: dict[str, list[LeftOutTool]] = {}
        for offer in offers:
            self.left_out.setdefault(offer.server, []).extend(offer.left_out)
        self._servers = {server.label: server for server in server_tools.servers}
        self._trained: dict[str, HostedTool] = {}
        self._tools: dict[str, HostedTool] = {}
        names = ToolNames(reserved=self._client)
        for offer in offers:
            builtin = self._builtin(offer)
            # The name of a client function takes precedence over the trained name of a built-in tool.
            trained = {} if self._is_taken(builtin) else _trained(builtin, offer.tools)
            self._trained |= trained
            if not trained:
                self._tools |= {
                    # The search tool has no server prefix, because the client knows it by its own name.
                    tool.name if offer.server == SEARCH_LABEL else names.add(builtin or tool.server, tool.name): tool
                    for tool in offer.tools
                }

    def __contains__(self, name: object) -> bool:
        """Return whether the gateway handles calls to `name`.

        If the request has tool servers, the gateway handles every name that is not the name of a client's tool.
        """
        # This includes names that the model invented: the gateway replies with the names that exist.
        return bool(self._servers) and name not in self._client

    def tool(self, name: str) -> HostedTool | None:
        """Return the tool with this name; None if the model invented the name.

        Also returns None if the tool's server is not in the request. A journal may contain offers of such a server.
        """
        tool = self._trained.get(name) or self._tools.get(name)
        return tool if tool is not None and tool.server in self._servers else None

    @property
    def every(self) -> Mapping[str, HostedTool]:
        """Return all offered tools, keyed by the names under which the model knows them."""
        return self._tools | self._trained

    @property
    def deferred(self) -> tuple[FunctionTool, ...]:
        """Return the tools that are not declared before a search finds them; call `plan` first."""
        if self.server_tools.search is None:
            return ()
        found = ((name, tool) for name, tool in self._tools.items() if self._is_deferred(tool))
        return tuple(replace(_declared(name, tool), server=tool.server) for name, tool in found)

    def not_found_yet(self, conversation: Conversation) -> tuple[FunctionTool, ...]:
        """Return the deferred tools that no search in the conversation found."""
        added = (item.tools for item in conversation.items if isinstance(item, AddedTools))
        known = {tool.name for tools in added for tool in tools}
        return tuple(tool for tool in self.deferred if tool.name not in known)

    def with_servers_of_found(self, outcome: ToolOutcome) -> ToolOutcome:
        """Return the outcome of a search, extended by the server and tool name of each found tool."""
        names, structured = found_names(outcome), outcome.structured
        found = ((tool.name, self._tools[tool.name]) for tool in self.deferred if tool.name in names)
        places: dict[str, Json] = {name: [tool.server, tool.name] for name, tool in found}
        if not places or not isinstance(structured, dict):
            return outcome
        return replace(outcome, structured={**structured, FOUND_ON: places})

    def _is_deferred(self, tool: HostedTool) -> bool:
        return tool.server in self._servers and self._servers[tool.server].deferred

    @property
    def builtins(self) -> tuple[Builtin, ...]:
        """Return the offered tools that gpt-oss was trained on.

        `python` has the description of its server, because the trained description promises a stateful notebook.
        """
        offered: dict[str, Builtin] = {}
        for name, tool in self._trained.items():
            kind = namespace(name)
            offered.setdefault(kind, Builtin(kind, tool.description if FUNCTIONS_OF[kind] == {kind} else ""))
        return tuple(offered.values())

    def _builtin(self, offer: ServerOffer) -> str:
        server = self._servers.get(offer.server)
        return "" if server is None else server.builtin

    def _is_taken(self, builtin: str) -> bool:
        """Return whether a client function has the name of a function of the built-in tool.

        The built-in tool is then declared as a function with a different name.
        """
        return not FUNCTIONS_OF.get(builtin, frozenset()).isdisjoint(self._client)

    def server(self, tool: HostedTool) -> ToolServer:
        return self._servers[tool.server]

    def place(self, call: ServerToolCall) -> tuple[str, str]:
        """Return the server label and the tool name that a call addresses.

        The label is empty if the name of the call contains no known server.
        """
        if (tool := self._trained.get(call.name) or self._tools.get(call.name)) is not None:
            return tool.server, tool.name
        for name, trained in self._trained.items():
            if namespace(name) == namespace(call.name):
                return trained.server, call.name.partition(".")[2]
        label, separator, name = call.name.partition(SEPARATOR)
        return (label, name) if separator and (label in self._servers or call.approval) else ("", call.name)

    def names_near(self, call: ServerToolCall, hidden: Collection[str], client: Sequence[str]) -> list[str]:
        """Return names that the model may have meant: tools of the addressed server, or all tools.

        If the server has no tools, all tools are returned, with the client's tools first. `client` are the names of the
        client's tools. `hidden` are the names of tools that no search has found yet; they are not returned.
        """
        label, _ = self.place(call)
        tools = {name: tool for name, tool in (self._trained | self._tools).items() if name not in hidden}
        near = [name for name, tool in tools.items() if tool.server == label]
        return (near or [*client, *tools])[:MAX_NAMES_NEAR]

    def plan(self, client: Sequence[FunctionTool], at: str, schema_field: str = "parameters") -> tuple[ToolSet, bool]:
        """Declare all tools, the client's first, and return whether all server tools are included.

        Server tools that cannot be declared are left out and do not exist for the request. The same applies to built-in
        tools of an unavailable server. Raises InvalidRequest if a tool of the client is invalid. `at` and
        `schema_field` are as for `plan_tools`.
        """
        planned = self._plan(client, at, schema_field)
        missing = any(offer.error is not None and self._builtin(offer) for offer in self.offers)
        return planned.with_builtins(builtin.name for builtin in self.builtins), not (
            missing or any(self.left_out.values())
        )

    def _plan(self, client: Sequence[FunctionTool], at: str, schema_field: str) -> ToolSet:
        planned = plan_tools(client, at=at, schema_field=schema_field)
        if not self._tools:
            return planned
        try:
            return plan_tools((*client, *self._declared()), at=at, schema_field=schema_field)
        except InvalidRequest:
            self._leave_out({name: reason for name, tool in self._tools.items() if (reason := _refusal(name, tool))})
        while self._tools:
            try:
                return plan_tools((*client, *self._declared()), at=at, schema_field=schema_field)
            except InvalidRequest as refusal:
                # Each tool is valid, but there are too many tools: drop the second half, and try again.
                self._leave_out(dict.fromkeys(list(self._tools)[len(self._tools) // 2 :], refusal.message))
        return planned

    def _leave_out(self, reasons: Mapping[str, str]) -> None:
        for name, reason in reasons.items():
            tool = self._tools.pop(name)
            self.left_out.setdefault(tool.server, []).append(LeftOutTool(tool, reason))

    def _declared(self) -> list[FunctionTool]:
        """Return the declarations; the first tool of a server also has the server's description."""
        # A prompt declares only tools, so it has no other place for the description of a server. The search tool itself
        # describes deferred servers.
        is_searched = self.server_tools.search is not None
        servers = [server for server in self._servers.values() if not (is_searched and server.deferred)]
        sayings = {server.label: server.description for server in servers}
        return [_declared(name, tool, sayings.pop(tool.server, "")) for name, tool in self._tools.items()]

    def note(self) -> Mapping[str, Json]:
        """Return the offers as a note for the journal."""
        offers: list[Json] = []
        for offer in self.offers:
            tools: list[Json] = [
                [tool.name, tool.description, dict(tool.schema), dict(tool.annotations)] for tool in offer.tools
            ]
            offers.append([offer.server, offer.error, tools])
        return {LISTED: offers}


def notes_on_left_out(server: str, left_out: Sequence[LeftOutTool]) -> Iterator[str]:
    """Yield notes for the client about tools of a server that were not offered to the model."""
    for each in left_out[:MAX_NOTED_TOOLS]:
        yield f"tool {each.tool.name[:MAX_NOTED_NAME_CHARS]!r} of server {server!r}: left out, {each.reason}"
    if len(left_out) > MAX_NOTED_TOOLS:
        yield f"server {server!r}: {len(left_out) - MAX_NOTED_TOOLS} more tools left out"


def offers_in(journal: Sequence[int]) -> tuple[ServerOffer, ...] | None:
    """Return the offers that the beginning of the journal contains; None if it has no offers.

    Raises StoreUnreadable if the record is damaged.
    """
    parts = parts_of(journal)
    first = next(parts, None)
    if isinstance(first, JournalEntry) and NOTED in first.value:
        first = next(parts, None)
    if not isinstance(first, JournalEntry) or not isinstance(listed := first.value.get(LISTED), list):
        return None
    return tuple(_offer(*entry) for entry in listed if isinstance(entry, list))


def _offer(label: Json, error: Json, tools: Json) -> ServerOffer:
    label = str(label)
    read = tuple(_tool(label, *tool) for tool in tools if isinstance(tool, list)) if isinstance(tools, list) else ()
    return ServerOffer(label, read, None if error is None else str(error))


def _tool(label: str, name: Json, description: Json, schema: Json, annotations: Json) -> HostedTool:
    return HostedTool(
        label,
        str(name),
        str(description),
        schema if isinstance(schema, dict) else {},
        annotations if isinstance(annotations, dict) else {},
    )


def _trained(builtin: str, tools: Sequence[HostedTool]) -> dict[str, HostedTool]:
    """Return the tools that implement the functions of a built-in tool, by their trained names.

    If the built-in tool has one function and the server has one tool, their names may differ.
    """
    functions = FUNCTIONS_OF.get(builtin, frozenset())
    found = {tool.name: tool for tool in tools}
    # Sorted, so that the prompt does not depend on the order in which a server lists its tools.
    named = {name: found[own] for name in sorted(functions) if (own := name.rpartition(".")[2]) in found}
    if not named and len(functions) == len(tools) == 1:
        return dict(zip(functions, tools, strict=True))
    return named


def _declared(name: str, tool: HostedTool, about: str = "") -> FunctionTool:
    return FunctionTool(name, "\n\n".join(filter(None, (about, tool.description))), tool.schema or None)


def _refusal(name: str, tool: HostedTool) -> str:
    """Return the reason why the tool cannot be declared; empty if it can be declared."""
    try:
        plan_tools([_declared(name, tool)])
    except InvalidRequest as refusal:
        return refusal.message
    return ""


def decided_calls(
    conversation: Conversation, server_tools: ServerTools
) -> tuple[list[ServerToolCall], list[ToolResult]]:
    """Return the approved calls, in the order of the decisions, and the results of denied calls.

    A decision is ignored if the conversation does not contain its call, or if the call has a result already.
    """
    waiting = {item.call_id: item for item in conversation.items if isinstance(item, AssistantCall)}
    for item in conversation.items:
        if isinstance(item, ToolResult):
            waiting.pop(item.call_id, None)
    approved: list[ServerToolCall] = []
    denied: list[ToolResult] = []
    for decision in server_tools.decisions:
        call = waiting.pop(decision.call_id, None)
        if call is None:
            continue
        if decision.approved:
            approved.append(
                ServerToolCall(
                    call.call_id,
                    call.name,
                    call.arguments if decision.arguments is None else decision.arguments,
                    approval=decision.approval,
                    earlier_tokens=call.tokens,
                    answer=decision.answer,
                )
            )
        else:
            denied.append(ToolResult(call.call_id, call.name, decision.denial))
    return approved, denied


def with_results(conversation: Conversation, results: Sequence[ToolResult]) -> Conversation:
    """Return the conversation with each result directly after its call."""
    by_call = {result.call_id: result for result in results}
    items: list[Item] = []
    for item in conversation.items:
        items.append(item)
        if isinstance(item, AssistantCall) and (result := by_call.pop(item.call_id, None)) is not None:
            items.append(result)
    return replace(conversation, items=tuple(items))


def found_tools(conversation: Conversation, names: Collection[str]) -> AddedTools | None:
    """Return the deferred tools with these names, which a search found; None if no tool matches."""
    found = tuple(tool for tool in conversation.deferred if tool.name in names)
    return AddedTools(found) if found else None
