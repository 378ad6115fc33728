"""Items of server tools: tool lists, calls, and approval requests."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.api.builtin_tools import PYTHON, builtin_of, public_label
from unisono.api.responses.items import COMPLETED, FAILED, IN_PROGRESS, INCOMPLETE, Wire, to_item
from unisono.api.responses.outbound.builtin_calls import BuiltinCalls, code_of, is_trained
from unisono.api.responses.outbound.item_lifecycle import CODE_RUN, MCP_CALL, MCP_LIST, WEB_SEARCH, ServerItemKind
from unisono.core.conversation import Item, ToolResult
from unisono.core.events import Closed, HostedCall, Listed, Listing, Ran
from unisono.core.events import Item as Made
from unisono.core.state_store import StoredItem
from unisono.core.tools import HostedTool
from unisono.engine.server_tools.policy import OUTCOME_UNKNOWN


def kind_of(item: Made) -> ServerItemKind:
    """Return the item type that represents a tool list or a call of a server tool."""
    if not isinstance(item, HostedCall):
        return MCP_LIST
    if not is_trained(item):
        return MCP_CALL
    return CODE_RUN if builtin_of(item.server) == PYTHON else WEB_SEARCH


def complete_text(item: HostedCall, text: str) -> str:
    """Return the complete text of a call's deltas, for the model's arguments `text`."""
    return code_of(item) if is_trained(item) else text


def started_item(item: HostedCall, item_id: str, trained: BuiltinCalls) -> Wire:
    """Return the item of a call before it runs, without streamed fields."""
    if not is_trained(item):
        return call(item, item_id, "")
    wire = trained.to_wire(item, item_id, IN_PROGRESS)
    return wire | {"code": ""} if "code" in wire else wire


def call(item: HostedCall, item_id: str, arguments: str, status: str = IN_PROGRESS, ran: Ran | None = None) -> Wire:
    """Return the item of a call; `ran` is its result."""
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


def request(item: HostedCall, item_id: str, arguments: str) -> Wire:
    """Return the item of a call that needs approval."""
    return {
        "id": item_id,
        "type": "mcp_approval_request",
        "arguments": arguments,
        "name": item.tool,
        "server_label": public_label(item.server),
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
    """Return a finished call as stored.

    An approved call is in the conversation already, and only its result is added. `before` holds earlier output of
    the model that was not emitted.
    """
    item = closed.item
    assert isinstance(item, HostedCall)
    made = to_item(closed)
    result = ToolResult(item.call_id, item.name, OUTCOME_UNKNOWN if ran is None else ran.text_for_model)
    if is_trained(item):
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
    """Return a tool list as stored. `listed` is None for an interrupted list."""
    if listed is None:
        return StoredItem(item_id, (), listing(item, item_id, error="The listing of the tools was interrupted."))
    return StoredItem(item_id, (), listing(item, item_id, listed.tools, listed.error))
