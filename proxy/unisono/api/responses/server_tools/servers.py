"""Tool servers of a request.

The operator sets the rules, and a request can only narrow them. A server is configured by the operator and found by
its label or exact address, or it is on a host that the operator allowed. A request can restrict the available tools
and require more approvals. Its headers are sent only to the server they belong to; the caller's API key is sent to
no server.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urlsplit

from unisono.api.gateway_tools import builtin_for, missing_setting
from unisono.api.request_options import without_effect
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.responses.server_tools.mcp_spec import McpSpec
from unisono.api.tool_choice import SERVER, HostedTool, NamedTool, OfferedTools, not_declared
from unisono.api.tools import TOOL_SEARCH, Toolbox
from unisono.core.access import Caller
from unisono.core.tools import SEARCH_LABEL, Approval, ToolServer, ToolTransport
from unisono.errors import InvalidRequest, ToolServerNotAllowed, UnsupportedValue

# Server tools in `tool_choice`: named by server label, or by kind for builtin tools.

CHOICE: Final = "tool_choice"


def on_offer(
    request: ResponsesRequest, toolbox: Toolbox, servers: Sequence[ToolServer], *, has_search: bool = False
) -> OfferedTools:
    """Return the tools that the request's `tool_choice` can name.

    `has_search`: the gateway searches for deferred tools.
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


# Maximum number of servers of a request. All of them list their tools before generation.
MAX_SERVERS = 16

OWN_CREDENTIALS = frozenset({"authorization", "x-api-key"})


def _no_check(headers: Mapping[str, str], authorization: str | None) -> None:
    """Accept all headers. The component that connects to servers checks them."""


@dataclass(frozen=True, slots=True)
class ServerRules:
    """The operator's rules for tool servers.

    `configured` holds the servers by label. `builtins` maps tools that gpt-oss was trained on to server labels.
    `may_name` returns True if a request may name a server at an address. `check_headers` raises InvalidRequest for
    headers that cannot be sent.
    """

    configured: Mapping[str, ToolServer] = field(default_factory=dict)
    builtins: Mapping[str, str] = field(default_factory=dict)
    may_name: Callable[[str], bool] = lambda _: False
    check_headers: Callable[[Mapping[str, str], str | None], None] = _no_check

    def for_model(self, labels: Collection[str] | None) -> ServerRules:
        """Return the rules of a model that may use only the servers in `labels`; None means all."""
        if labels is None:
            return self
        return replace(self, configured={label: self.configured[label] for label in labels})

    def for_caller(self, caller: Caller) -> ServerRules:
        """Return the rules of a caller.

        A caller restricted to some servers may name none at an address.
        """
        if caller.mcp_servers is None:
            return self
        permitted = {label: server for label, server in self.configured.items() if label in caller.mcp_servers}
        return replace(self, configured=permitted, may_name=lambda _: False)

    @property
    def trained(self) -> dict[str, ToolServer]:
        """Return the servers for builtin tools, by tool name."""
        named = {builtin: self.configured.get(label) for builtin, label in self.builtins.items()}
        return {builtin: server for builtin, server in named.items() if server is not None}

    def find(self, spec: McpSpec) -> ToolServer | None:
        """Return the configured server for a tool, or None."""
        named = self.configured.get(spec.server_label)
        if spec.server_url is None or (named is not None and named.url == spec.server_url):
            return named
        return next((server for server in self.configured.values() if server.url == spec.server_url), None)


def to_servers(specs: Sequence[tuple[str, McpSpec]], rules: ServerRules, owner: str) -> tuple[ToolServer, ...]:
    """Return the servers in the request's order.

    Each spec is paired with its field; `owner` owns the connections. Raises InvalidRequest and ToolServerNotAllowed,
    naming the field.
    """
    servers: dict[str, ToolServer] = {}
    for at, spec in specs:
        if spec.server_label in servers:
            raise InvalidRequest(
                f"'{at}.server_label': another tool server has the same label '{spec.server_label}'.",
                param=f"{at}.server_label",
            )
        if len(servers) >= MAX_SERVERS:
            raise InvalidRequest(f"'{at}': the request has more than {MAX_SERVERS} tool servers.", param=at)
        servers[spec.server_label] = _to_server(at, spec, rules, owner)
    return tuple(servers.values())


def _to_server(at: str, spec: McpSpec, rules: ServerRules, owner: str) -> ToolServer:
    configured = rules.find(spec)
    server = _named(at, spec, rules) if configured is None else configured
    server = _with_credentials(at, spec, server, rules)
    narrowed = None if spec.allowed_tools is None else spec.allowed_tools.filter()
    if narrowed is not None and server.allowed is not None:
        narrowed = server.allowed & narrowed
    return replace(
        server,
        label=spec.server_label,
        owner=owner,
        allowed=server.allowed if narrowed is None else narrowed,
        approval=_joined(server.approval, spec),
        description=spec.server_description or server.description,
        deferred=bool(spec.defer_loading),
    )


def _named(at: str, spec: McpSpec, rules: ServerRules) -> ToolServer:
    """Return the tool server at the request's own `server_url`.

    Raises InvalidRequest without a URL, and ToolServerNotAllowed if the gateway may not connect to it.
    """
    if spec.server_url is None:
        known = ", ".join(sorted(rules.configured)) or "none"
        raise InvalidRequest(
            f"'{at}.server_label': tool server '{spec.server_label}' not found. "
            f"Use one of the configured servers ({known}), or set 'server_url'.",
            param=f"{at}.server_label",
        )
    if not rules.may_name(spec.server_url):
        raise ToolServerNotAllowed(
            f"'{at}.server_url': the gateway may not connect to this tool server. "
            "The operator can add its host to `mcp_allowed_hosts`.",
            param=f"{at}.server_url",
        )
    older = urlsplit(spec.server_url).path.rstrip("/").endswith("/sse")
    transport = ToolTransport.SSE if older else ToolTransport.STREAMABLE_HTTP
    return ToolServer(spec.server_label, spec.server_url, transport=transport, at=f"{at}.server_url")


def _with_credentials(at: str, spec: McpSpec, server: ToolServer, rules: ServerRules) -> ToolServer:
    """Add the request's credentials. The operator's own credentials are never replaced."""
    requested = {name: value.get_secret_value() for name, value in (spec.headers or {}).items()}
    authorization = None if spec.authorization is None else spec.authorization.get_secret_value()
    if not requested and authorization is None:
        return server
    if server.transport is ToolTransport.STDIO:
        raise InvalidRequest(f"'{at}': this tool server accepts neither 'headers' nor 'authorization'.", param=at)
    configured = {name.lower() for name in server.headers}
    has_own = server.authorization is not None or server.oauth is not None or bool(configured & OWN_CREDENTIALS)
    for name in requested:
        if name.lower() in configured or (has_own and name.lower() in OWN_CREDENTIALS):
            raise InvalidRequest(
                f"'{at}.headers': the operator sets '{name[:64]}' for this server; omit it.", param=f"{at}.headers"
            )
    if authorization is not None and has_own:
        raise InvalidRequest(
            f"'{at}.authorization': the operator sets the credentials for this server; omit this field.",
            param=f"{at}.authorization",
        )
    headers = {**server.headers, **requested}
    try:
        rules.check_headers(headers, authorization or server.authorization)
    except InvalidRequest as error:
        where = f"{at}.headers" if requested else f"{at}.authorization"
        raise InvalidRequest(f"'{where}': {error.message}", param=where) from None
    return replace(server, headers=headers, authorization=authorization or server.authorization)


def _joined(operator: Approval, spec: McpSpec) -> Approval:
    """Combine approval rules: either side can require approval.

    Without any rule, every call requires approval.
    """
    if spec.require_approval is None:
        return operator
    requested = spec.require_approval.approval()
    return requested if operator == Approval() else replace(requested, second=operator)


def notes_on(specs: Sequence[tuple[str, McpSpec]]) -> Iterator[str]:
    for at, spec in specs:
        yield from without_effect(f"{at}.", spec.model_extra or {})
