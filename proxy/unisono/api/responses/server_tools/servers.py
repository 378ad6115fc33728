"""Tool servers of a request.

The operator sets the rules, and a request can only narrow them. A server is configured by the operator and found by
its label or exact address, or it is on a host that the operator allowed. A request can restrict the available tools
and require more approvals. Its headers are sent only to the server they belong to; the caller's API key is sent to
no server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from unisono.api.client_toolbox import TOOL_SEARCH, Toolbox
from unisono.api.gateway_tools import PYTHON, builtin_for, missing_setting
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.responses.server_tools.approval_history import ServerToolHistory
from unisono.api.responses.server_tools.mcp_spec import McpSpec
from unisono.api.responses.server_tools.requested_approvals import combined_approval
from unisono.api.tool_choice import SERVER, HostedTool, NamedTool, OfferedTools, not_declared
from unisono.api.tool_server_rules import MAX_SERVERS, RequestedServer, ServerRules
from unisono.core.tool_host import SEARCH_LABEL, ToolServer
from unisono.engine.request import ServerTools
from unisono.errors import InvalidRequest, UnsupportedValue

# Field that names server tools: by server label, or by type for builtin tools.

CHOICE: Final = "tool_choice"


def on_offer(
    request: ResponsesRequest, toolbox: Toolbox, servers: Sequence[ToolServer], *, has_search: bool = False
) -> OfferedTools:
    """Return the tools that the request's `tool_choice` can name.

    `has_search` is True if the gateway searches for deferred tools.
    """
    labels = {server.label for server in servers if not server.builtin}
    builtins = {server.builtin: server.label for server in servers if server.builtin}
    declared = {builtin_for(tool.type) or tool.type for tool in request.tools or ()}

    def hosted(tool: NamedTool) -> HostedTool | None:
        if has_search and tool.kind == TOOL_SEARCH:
            return SEARCH_LABEL, None
        if tool.kind == SERVER:
            if tool.server not in labels:
                raise not_declared(tool, CHOICE)
            return tool.server, tool.name or None
        builtin = builtin_for(tool.kind)
        if (builtin or tool.kind) not in declared:
            raise not_declared(tool, CHOICE)
        label = builtins.get(builtin)
        if label is None and request.tool_choice is not None and request.tool_choice.one:
            setting = missing_setting(tool.kind)
            needs = f"; the operator can enable them with `{setting}`" if setting else ""
            raise UnsupportedValue(f"'{CHOICE}': tools of type '{tool.kind}' are not available{needs}.", param=CHOICE)
        return None if label is None else (label, None)

    return OfferedTools(toolbox, hosts=bool(servers) or has_search, hosted=hosted)


def to_servers(specs: Sequence[tuple[str, McpSpec]], rules: ServerRules, owner: str) -> tuple[ToolServer, ...]:
    """Return the tool servers of a request, in order.

    `specs` are pairs of a field path and the server declared there. `owner` is the tenant that owns the connections.
    Raises InvalidRequest for a repeated label or too many servers, and ToolServerNotAllowed for a server that the
    operator does not allow.
    """
    servers: dict[str, ToolServer] = {}
    for at, spec in specs:
        if spec.server_label in servers:
            raise InvalidRequest(
                f"'{at}.server_label': two tool servers have the label '{spec.server_label}'; rename one of them.",
                param=f"{at}.server_label",
            )
        if len(servers) >= MAX_SERVERS:
            raise InvalidRequest(
                f"'{at}': the request has more than {MAX_SERVERS} tool servers; remove some of them.", param=at
            )
        servers[spec.server_label] = _to_server(at, spec, rules, owner)
    return tuple(servers.values())


def _to_server(at: str, spec: McpSpec, rules: ServerRules, owner: str) -> ToolServer:
    server = rules.server_for(
        RequestedServer(
            (at, "server_label", "server_url", "headers", "authorization"),
            spec.server_label,
            spec.server_url,
            {name: value.get_secret_value() for name, value in (spec.headers or {}).items()},
            None if spec.authorization is None else spec.authorization.get_secret_value(),
        )
    )
    narrowed = None if spec.allowed_tools is None else spec.allowed_tools.filter()
    if narrowed is not None and server.allowed is not None:
        narrowed = server.allowed & narrowed
    return replace(
        server,
        label=spec.server_label,
        owner=owner,
        allowed=server.allowed if narrowed is None else narrowed,
        approval=combined_approval(server.approval, spec.require_approval),
        description=spec.server_description or server.description,
        deferred=bool(spec.defer_loading),
    )


def to_server_tools(
    request: ResponsesRequest, earlier: ServerToolHistory, now: ServerToolHistory, servers: tuple[ToolServer, ...]
) -> ServerTools | None:
    """Return the server tools and the decisions on their calls; None if the request has neither.

    `now` is the server tool history in the request's input, and `earlier` is the history before the input. With
    `tool_choice: none`, the model is offered no server. An approved call is then not run, and its result is an error.
    """
    servers = () if request.has_no_calls else servers
    if not servers and not now.decisions:
        return None
    # No tool list is emitted for a builtin tool, because the client knows its functions.
    trained = {server.label for server in servers if server.builtin}
    announced = earlier.announced | now.announced | trained
    # Clients send executed code back with its outputs, but not the results of web searches.
    visible = frozenset(server.label for server in servers if server.builtin in ("", PYTHON))
    return ServerTools(
        servers, announced, now.decisions, max_calls=request.max_tool_calls, visible=visible, can_ask=True
    )
