"""Items of server tools: tool lists, calls, approval requests, web search, code execution.

Calls to builtin tools have the form of OpenAI's items for web search and code execution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import orjson

from unisono.api.client_toolbox import Toolbox
from unisono.api.gateway_tools import BROWSER, PYTHON, SEARCH, builtin_of, public_label
from unisono.api.responses.items import (
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    Wire,
    served_id,
    to_item,
    wire_tools,
)
from unisono.api.responses.outbound.citations import CitedPages
from unisono.api.responses.outbound.item_lifecycle import (
    CODE_RUN,
    MCP_CALL,
    MCP_LIST,
    TOOL_SEARCH_CALL,
    WEB_SEARCH,
    ServerItemKind,
)
from unisono.api.responses.server_tools.approval_history import SEALED
from unisono.api.tool_calls import to_value
from unisono.api.tool_search import found_on_servers
from unisono.core.conversation import AddedTools, FunctionTool, Item, Json, ToolResult
from unisono.core.events import Closed, HostedCall, Listed, Listing, Ran
from unisono.core.events import Item as Made
from unisono.core.state_store import StoredItem
from unisono.core.tool_host import HostedTool, found_names
from unisono.engine.server_tools.call_verdicts import OUTCOME_UNKNOWN

# Action types by browser function.
ACTIONS: Final = {"search": "search", "open": "open_page", "find": "find_in_page"}


@dataclass(slots=True)
class BuiltinCalls:
    """Renderer of the builtin tool calls of one response.

    `sources` and `outputs` are True if the client requested these fields. `container` is the container id of the
    response. `pages` holds the pages that the browser has returned so far.
    """

    sources: bool = False
    outputs: bool = False
    container: str = ""
    pages: CitedPages = field(default_factory=CitedPages)

    def to_wire(self, item: HostedCall, item_id: str, status: str, ran: Ran | None = None) -> Wire:
        """Return the item of a call. `ran` is the result of the call, or None if there is none yet."""
        arguments = item.arguments.members
        if builtin_of(item.server) == BROWSER:
            action = self._action(item.tool, arguments, ran)
            return {"id": item_id, "type": "web_search_call", "status": status, "action": action}
        outputs = [{"type": "logs", "logs": ran.text_for_model}] if ran is not None and self.outputs else None
        return {
            "id": item_id,
            "type": "code_interpreter_call",
            "status": status,
            "code": _text(arguments.get("code")),
            "container_id": self.container,
            "outputs": outputs,
        }

    def _action(self, tool: str, arguments: Mapping[str, Json], ran: Ran | None) -> Wire:
        facts = ran.outcome.structured if ran is not None and isinstance(ran.outcome.structured, dict) else {}
        kind = ACTIONS[tool]
        if kind == "search":
            query = _text(arguments.get("query"))
            action: Wire = {"type": kind, "query": query, "queries": [query]}
            return action | {"sources": _sources(facts)} if self.sources and ran is not None else action
        url = _text(facts.get("url")) or self._address(arguments)
        if kind == "open_page":
            return {"type": kind, "url": url or None}
        return {"type": kind, "url": url, "pattern": _text(arguments.get("pattern"))}

    def _address(self, arguments: Mapping[str, Json]) -> str:
        """Return the address of the page that a call opens, or "" if only its result can tell."""
        link = arguments.get("id", -1)
        if isinstance(link, str):
            return link
        page = self.pages.get(arguments.get("cursor", -1))
        if page is None:
            return ""
        if isinstance(link, int) and link >= 0:
            return page.results.get(link, ("", ""))[0]
        return page.url

    def record_result(self, item: HostedCall, ran: Ran) -> None:
        """Record the result of a call, so that the returned page can be cited."""
        if builtin_of(item.server) == BROWSER and not ran.outcome.is_error:
            self.pages.add_result(ran.text_for_model, ran.outcome.structured)


def is_trained(item: HostedCall) -> bool:
    """Return True for a call to `python` or to an existing function of `browser`."""
    builtin = builtin_of(item.server)
    return builtin == PYTHON or (builtin == BROWSER and item.tool in ACTIONS)


def code_of(item: HostedCall) -> str:
    """Return the streamed part of a call: the code of a code execution, or "" for other calls."""
    if builtin_of(item.server) != PYTHON:
        return ""
    return _text(item.arguments.members.get("code"))


def _sources(facts: Mapping[str, Json]) -> list[Wire]:
    results = facts.get("results")
    found = (result.get("url") for result in (results if isinstance(results, list) else ()) if isinstance(result, dict))
    return [{"type": "url", "url": url} for url in dict.fromkeys(found) if isinstance(url, str) and url]


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def kind_of(item: Made) -> ServerItemKind:
    """Return the item type that represents a tool list or a call of a server tool."""
    if not isinstance(item, HostedCall):
        return MCP_LIST
    if builtin_of(item.server) == SEARCH:
        return TOOL_SEARCH_CALL
    if not is_trained(item):
        return MCP_CALL
    return CODE_RUN if builtin_of(item.server) == PYTHON else WEB_SEARCH


def complete_text(item: HostedCall, text: str) -> str:
    """Return the complete streamed text of a call; `text` contains the model's arguments."""
    return code_of(item) if is_trained(item) else text


def started_item(item: HostedCall, item_id: str, trained: BuiltinCalls) -> Wire:
    """Return the item of a call before the call runs. Its streamed fields are still empty."""
    if builtin_of(item.server) == SEARCH:
        return search_call(item, item_id, IN_PROGRESS)
    if not is_trained(item):
        return call(item, item_id, "")
    wire = trained.to_wire(item, item_id, IN_PROGRESS)
    return wire | {"code": ""} if "code" in wire else wire


def call(item: HostedCall, item_id: str, arguments: str, status: str = IN_PROGRESS, ran: Ran | None = None) -> Wire:
    """Return the item of a call. `ran` is the result of the call, or None if there is none yet."""
    output, error = None, None
    if ran is not None and ran.outcome.is_error:
        error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": ran.text_for_model}]}
    elif ran is not None:
        output = ran.text_for_model
    return {
        "id": item_id,
        "type": "mcp_call",
        "status": status,
        "approval_request_id": item.approval or None,
        "arguments": arguments,
        "error": error,
        "name": item.tool,
        "output": output,
        "server_label": public_label(item.server),
    }


def search_call(item: HostedCall, item_id: str, status: str) -> Wire:
    """Return the item of a tool search that the gateway runs."""
    fields: Wire = {"status": status, "call_id": None, "execution": "server"}
    return {"id": item_id, "type": "tool_search_call", **fields, "arguments": to_value(item.arguments.text)}


def search_status(ran: Ran | None) -> str:
    """Return the status of a tool search and of its output."""
    # OpenAI defines no status for a failure of these items.
    return INCOMPLETE if ran is None or ran.outcome.is_error else COMPLETED


def to_stored_search_result(ran: Ran, toolbox: Toolbox, declared: Sequence[Wire]) -> StoredItem:
    """Return the stored result of a tool search. `declared` are the tools of the request."""
    item_id = served_id(ran.item.call_id, "tool_search_output")
    # The tools are in the order in which the model reads their names. The prompt then stays the same when the client
    # sends the item back.
    known = {tool.name: replace(tool, deferred=False) for tool in toolbox.tools}
    found = tuple(known[name] for name in found_names(ran.outcome) if name in known)
    tools = wire_tools(found)
    on_servers = found_on_servers(ran.outcome)
    found += tuple(FunctionTool(name, server=label) for name, (label, _) in on_servers.items())
    for label in dict.fromkeys(label for label, _ in on_servers.values()):
        server = next((tool for tool in declared if tool.get("server_label") == label), {})
        tools.append({**server, "allowed_tools": [name for at, name in on_servers.values() if at == label]})
    fields: Wire = {"status": search_status(ran), "call_id": None, "execution": "server", "tools": tools}
    result = ToolResult(ran.item.call_id, ran.item.name, ran.text_for_model)
    meaning = (result, AddedTools(found)) if found else (result,)
    return StoredItem(item_id, meaning, {"id": item_id, "type": "tool_search_output", **fields})


def request_type(item: HostedCall) -> str:
    """Return the item type of a call that waits for an approval or for an answer."""
    return "mcp_approval_request" if item.question is None else "mcp_elicitation_request"


def request(item: HostedCall, item_id: str, arguments: str) -> Wire:
    """Return the item of a call that waits for the user's approval, or for the user's answer."""
    question: Wire = {}
    if item.question is not None:
        form: Wire = {"mode": "form", "requested_schema": dict(item.question.schema)}
        page: Wire = {"mode": "url", "url": item.question.url}
        state = orjson.dumps(item.question.state).decode()
        question = {"message": item.question.message, **(page if item.question.url else form), "state": state}
    return {
        "id": item_id,
        "type": request_type(item),
        "arguments": arguments,
        "name": item.tool,
        "server_label": public_label(item.server),
        **question,
        **({SEALED: item.sealed} if item.sealed else {}),
    }


def listing(item: Listing, item_id: str, tools: Sequence[HostedTool] = (), error: str | None = None) -> Wire:
    return {
        "id": item_id,
        "type": "mcp_list_tools",
        "server_label": item.server,
        "tools": [_tool(tool) for tool in tools],
        "error": error,
    }


def _tool(tool: HostedTool) -> Wire:
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": dict(tool.schema),
        "annotations": dict(tool.annotations) or None,
    }


def status_of(ran: Ran | None) -> str:
    """Return the status of a call. A call without a result was interrupted."""
    if ran is None:
        return INCOMPLETE
    return FAILED if ran.outcome.is_error else COMPLETED


def to_stored_call(
    closed: Closed, item_id: str, ran: Ran | None, before: Sequence[Item], trained: BuiltinCalls
) -> StoredItem:
    """Return the stored item of a server tool call that the model has finished writing.

    `closed` is the event that ended the writing of the call. `ran` has the result of the call; it is None if the
    outcome is unknown. The item of an approved call adds only the result, since the call itself is already in the
    conversation. `before` holds output that the model wrote before the call and that was not emitted. `trained` renders
    calls to the builtin tools that gpt-oss was trained with.
    """
    item = closed.item
    assert isinstance(item, HostedCall)
    made = to_item(closed)
    result = ToolResult(item.call_id, item.name, OUTCOME_UNKNOWN if ran is None else ran.text_for_model)
    if builtin_of(item.server) == SEARCH:
        wire = search_call(item, item_id, search_status(ran))
        if ran is not None:  # the result is an item of its own
            return StoredItem(item_id, (*before, *(() if made is None else (made,))), wire)
    elif is_trained(item):
        wire = trained.to_wire(item, item_id, status_of(ran), ran)
    else:
        wire = call(item, item_id, closed.text, status_of(ran), ran)
    return StoredItem(item_id, (*before, *(() if made is None else (made,)), result), wire)


def to_stored_request(closed: Closed, item_id: str, before: Sequence[Item]) -> StoredItem:
    item = closed.item
    assert isinstance(item, HostedCall)
    made = to_item(closed)
    meaning = (*before, *(() if made is None else (made,)))
    return StoredItem(item_id, meaning, request(item, item_id, closed.text))


def to_stored_listing(item: Listing, item_id: str, listed: Listed | None) -> StoredItem:
    """Return the stored item of a tool list. `listed` is None if the listing was interrupted."""
    if listed is None:
        return StoredItem(item_id, (), listing(item, item_id, error="The listing of the tools was interrupted."))
    return StoredItem(item_id, (), listing(item, item_id, listed.tools, listed.error))
