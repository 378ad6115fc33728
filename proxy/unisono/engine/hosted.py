"""The hosted tools of one turn: what their servers offer, under names the model knows, and what a name stands for.

What was offered when the turn began holds until its end, whatever a server says later; it can be noted in a journal
and read from there. No I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from unisono.core.conversation import AssistantCall, Builtin, Conversation, FunctionTool, Item, Json, ToolResult
from unisono.core.tool_names import SEPARATOR, ToolNames
from unisono.core.tools import HostedTool, LeftOutTool, ToolServer
from unisono.engine.journal import NOTED, JournalEntry, parts_of
from unisono.engine.steps import ServerToolCall
from unisono.engine.turn import ServerTools
from unisono.errors import InvalidRequest
from unisono.harmony.builtin_tools import FUNCTIONS_OF, namespace
from unisono.harmony.tools import ToolSet, plan_tools

LISTED: Final = "listed"
NOTED_TOOLS: Final = 8
"""Left-out tools of one server that notes name."""
NOTED_NAME: Final = 64
"""Characters of a name in a note."""
NAMED: Final = 64
"""So many names the model is told of at most when it made one up."""


@dataclass(frozen=True, slots=True)
class ServerOffer:
    """A server's tools, or with `error` why there are none. `left_out` are tools whose names cannot be used."""

    server: str
    tools: tuple[HostedTool, ...] = ()
    error: str | None = None
    left_out: tuple[LeftOutTool, ...] = ()


class OfferedServerTools:
    """`client` are the names of the client's own tools, which no hosted one gets."""

    def __init__(self, hosting: ServerTools, offers: Sequence[ServerOffer], client: Collection[str]) -> None:
        self.hosting = hosting
        self.offers = tuple(offers)
        self._client = frozenset(client)
        self.left_out: dict[str, list[LeftOutTool]] = {}
        """Tools that the model is not offered, by server; complete after `plan`."""
        for offer in offers:
            self.left_out.setdefault(offer.server, []).extend(offer.left_out)
        self._servers = {server.label: server for server in hosting.servers}
        self._trained: dict[str, HostedTool] = {}
        self._tools: dict[str, HostedTool] = {}
        names = ToolNames(taken=self._client)
        for offer in offers:
            builtin = self._builtin(offer)
            trained = {} if self._is_taken(builtin) else _trained(builtin, offer.tools)
            self._trained |= trained
            if not trained:
                self._tools |= {names.add(builtin or tool.server, tool.name): tool for tool in offer.tools}

    def __contains__(self, name: str) -> bool:
        """Whether a call of that name is the gateway's affair: where servers are hosted that is every name which is
        not the client's."""
        return bool(self._servers) and name not in self._client

    def tool(self, name: str) -> HostedTool | None:
        """None for a name that the model made up, and for a tool whose server the turn does not host any more: what was
        offered may stand in an older journal."""
        tool = self._trained.get(name) or self._tools.get(name)
        return tool if tool is not None and tool.server in self._servers else None

    @property
    def every(self) -> Mapping[str, HostedTool]:
        """All tools on offer, by the names the model knows."""
        return self._tools | self._trained

    @property
    def builtins(self) -> tuple[Builtin, ...]:
        """The tools gpt-oss was trained on that are on offer. What `python` promises is what its server says, since the
        trained words promise a notebook that goes on."""
        offered: dict[str, Builtin] = {}
        for name, tool in self._trained.items():
            kind = namespace(name)
            offered.setdefault(kind, Builtin(kind, tool.description if FUNCTIONS_OF[kind] == {kind} else ""))
        return tuple(offered.values())

    def _builtin(self, offer: ServerOffer) -> str:
        server = self._servers.get(offer.server)
        return "" if server is None else server.builtin

    def _is_taken(self, builtin: str) -> bool:
        """Whether a function of the client is called what one of the builtin tool is: then that one is a function of
        another name."""
        return not FUNCTIONS_OF.get(builtin, frozenset()).isdisjoint(self._client)

    def server(self, tool: HostedTool) -> ToolServer:
        return self._servers[tool.server]

    def place(self, call: ServerToolCall) -> tuple[str, str]:
        """The label of the server and its tool that a call seems to be for; the label is empty where it is for none."""
        if (tool := self._trained.get(call.name) or self._tools.get(call.name)) is not None:
            return tool.server, tool.name
        for name, trained in self._trained.items():
            if namespace(name) == namespace(call.name):
                return trained.server, call.name.partition(".")[2]
        label, separator, name = call.name.partition(SEPARATOR)
        return (label, name) if separator and (label in self._servers or call.approval) else ("", call.name)

    def names_near(self, call: ServerToolCall) -> list[str]:
        """Names to choose from instead: those of the same server where there is one, else all."""
        label, _ = self.place(call)
        tools = self._trained | self._tools
        near = [name for name, tool in tools.items() if tool.server == label]
        return (near or list(tools))[:NAMED]

    def plan(self, client: Sequence[FunctionTool], at: str, schema_field: str = "parameters") -> tuple[ToolSet, bool]:
        """All tools as they are declared, the client's first, and whether all hosted ones are among them: one that
        cannot be declared is left out, and then there is no such tool; a builtin one whose server does not answer is
        left out too. Raises InvalidRequest for the client's own; `at` and `schema_field` as for `plan_tools`."""
        planned = self._plan(client, at, schema_field)
        missing = any(offer.error is not None and self._builtin(offer) for offer in self.offers)
        return planned.beside(builtin.name for builtin in self.builtins), not (missing or any(self.left_out.values()))

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
                # Each is fine and all of them are too much: what the last servers offer goes first.
                self._leave_out(dict.fromkeys(list(self._tools)[len(self._tools) // 2 :], refusal.message))
        return planned

    def _leave_out(self, reasons: Mapping[str, str]) -> None:
        for name, reason in reasons.items():
            tool = self._tools.pop(name)
            self.left_out.setdefault(tool.server, []).append(LeftOutTool(tool, reason))

    def _declared(self) -> list[FunctionTool]:
        """What is said of a server stands once, before what its first tool says: prompts know of tools only."""
        sayings = {label: server.description for label, server in self._servers.items()}
        return [_declared(name, tool, sayings.pop(tool.server, "")) for name, tool in self._tools.items()]

    def note(self) -> JournalEntry:
        """What was offered, for a journal."""
        offers: list[Json] = []
        for offer in self.offers:
            tools: list[Json] = [
                [tool.name, tool.description, dict(tool.schema), dict(tool.annotations)] for tool in offer.tools
            ]
            offers.append([offer.server, offer.error, tools])
        return JournalEntry({LISTED: offers})


def notes_on_left_out(server: str, left_out: Sequence[LeftOutTool]) -> Iterator[str]:
    """What a client reads about the tools of a server that the model was not offered."""
    for each in left_out[:NOTED_TOOLS]:
        yield f"tool {each.tool.name[:NOTED_NAME]!r} of server {server!r}: left out, {each.reason}"
    if len(left_out) > NOTED_TOOLS:
        yield f"server {server!r}: {len(left_out) - NOTED_TOOLS} more tools left out"


def offers_in(journal: Sequence[int]) -> tuple[ServerOffer, ...] | None:
    """What was offered when the journal was begun; None where it does not say. Raises StoreUnreadable."""
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
    """The functions of a builtin tool, by their trained names. A server of only one tool has the one function."""
    functions = FUNCTIONS_OF.get(builtin, frozenset())
    found = {tool.name: tool for tool in tools}
    # In an order of their own, so that servers that say the same in another one give equal prompts.
    named = {name: found[own] for name in sorted(functions) if (own := name.rpartition(".")[2]) in found}
    if not named and len(functions) == len(tools) == 1:
        return dict(zip(functions, tools, strict=True))
    return named


def _declared(name: str, tool: HostedTool, about: str = "") -> FunctionTool:
    return FunctionTool(name, "\n\n".join(filter(None, (about, tool.description))), tool.schema or None)


def _refusal(name: str, tool: HostedTool) -> str:
    """Why the tool cannot be declared; empty if it can."""
    try:
        plan_tools([_declared(name, tool)])
    except InvalidRequest as refusal:
        return refusal.message
    return ""


def decided_calls(conversation: Conversation, hosting: ServerTools) -> tuple[list[ServerToolCall], list[ToolResult]]:
    """The calls that were approved, in the order of the decisions, and the results of those that were not. A decision
    about a call that is not there, or has its result already, is about nothing."""
    waiting = {item.call_id: item for item in conversation.items if isinstance(item, AssistantCall)}
    for item in conversation.items:
        if isinstance(item, ToolResult):
            waiting.pop(item.call_id, None)
    approved: list[ServerToolCall] = []
    denied: list[ToolResult] = []
    for decision in hosting.decisions:
        call = waiting.pop(decision.call_id, None)
        if call is None:
            continue
        if decision.approved:
            approved.append(ServerToolCall(call.call_id, call.name, call.arguments, approval=decision.approval))
        else:
            denied.append(ToolResult(call.call_id, call.name, decision.denial))
    return approved, denied


def with_results(conversation: Conversation, results: Sequence[ToolResult]) -> Conversation:
    """The conversation with each result right behind its call."""
    by_call = {result.call_id: result for result in results}
    items: list[Item] = []
    for item in conversation.items:
        items.append(item)
        if isinstance(item, AssistantCall) and (result := by_call.pop(item.call_id, None)) is not None:
            items.append(result)
    return Conversation(conversation.preamble, tuple(items), conversation.prefill)
