"""Tool servers that a Messages request names in `mcp_servers` and `mcp_toolset`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import Field, SecretStr

from unisono.api.field_types import OpenModel, Text, ToolName
from unisono.api.tool_server_rules import MAX_SERVERS, RequestedServer, ServerRules
from unisono.core.tool_approvals import Approval, ToolFilter
from unisono.core.tool_host import ToolServer
from unisono.errors import InvalidRequest

TOOLSET: Final = "mcp_toolset"
# Label of a server that the request names. The pattern excludes the labels of builtin tools.
ServerName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]


class ToolConfiguration(OpenModel):
    """Selection of a server's tools, in the older form that `mcp_toolset` has replaced."""

    enabled: bool | None = None
    allowed_tools: list[ToolName] | None = None


class McpServerParam(OpenModel):
    """Tool server at a URL. The token is sent only to this server."""

    type: Literal["url"] = "url"
    name: ServerName
    url: Annotated[Text, Field(min_length=1, max_length=2048)]
    authorization_token: SecretStr | None = None
    tool_configuration: ToolConfiguration | None = None


class ToolsetConfig(OpenModel):
    """Settings for one tool of a toolset, or for all tools of the toolset."""

    enabled: bool | None = None
    defer_loading: bool | None = None

    def unused(self) -> Mapping[str, Any]:
        # `defer_loading` has no effect, because all tools of a server are in the prompt from the start.
        return {**(self.model_extra or {}), "defer_loading": self.defer_loading}


class ToolsetFields(OpenModel):
    """Fields of an `mcp_toolset`: default settings for a server's tools, and settings per tool."""

    mcp_server_name: ServerName | None = None
    default_config: ToolsetConfig | None = None
    configs: dict[Text, ToolsetConfig] | None = None

    def enabled_tools(self) -> ToolFilter | None:
        """Return a filter for the enabled tools; None if no tool is enabled."""
        configs = self.configs or {}
        named = {name: config.enabled for name, config in configs.items() if config.enabled is not None}
        if self.default_config is None or self.default_config.enabled is not False:
            return ToolFilter(excluded=frozenset(name for name, enabled in named.items() if not enabled))
        enabled = frozenset(name for name, is_enabled in named.items() if is_enabled)
        return ToolFilter(enabled) if enabled else None


def to_mcp_servers(
    servers: Sequence[McpServerParam], toolsets: Mapping[int, ToolsetFields], rules: ServerRules, owner: str
) -> tuple[ToolServer, ...]:
    """Return the servers whose tools the request enables.

    `toolsets` contains the toolsets in the request's `tools`, by index. This API has no approvals, so tools for which
    the operator requires approval are unavailable. Raises InvalidRequest for a toolset without a server, for two
    servers or toolsets with the same name, and for too many servers. Raises ToolServerNotAllowed if the gateway may not
    connect to a server. The errors name the field.
    """
    names = [server.name for server in servers]
    for position, toolset in toolsets.items():
        if toolset.mcp_server_name not in names:
            at = f"tools.{position}.mcp_server_name"
            raise InvalidRequest(f"'{at}': no server in 'mcp_servers' has this name; add one.", param=at)
    found = []
    for index, server in enumerate(servers):
        at = f"mcp_servers.{index}"
        if index >= MAX_SERVERS:
            raise InvalidRequest(f"'{at}': a request may name at most {MAX_SERVERS} tool servers.", param=at)
        if server.name in names[:index]:
            raise InvalidRequest(f"'{at}.name': another tool server has the same name; rename one.", param=f"{at}.name")
        own = [(position, each) for position, each in toolsets.items() if each.mcp_server_name == server.name]
        if len(own) > 1:
            again = f"tools.{own[1][0]}.mcp_server_name"
            raise InvalidRequest(f"'{again}': another toolset names the same server; merge the toolsets.", param=again)
        enabled = own[0][1].enabled_tools() if own else _old_filter(server.tool_configuration)
        if enabled is not None:
            found.append(_to_server(at, server, enabled, rules, owner))
    return tuple(found)


def _to_server(at: str, server: McpServerParam, enabled: ToolFilter, rules: ServerRules, owner: str) -> ToolServer:
    token = None if server.authorization_token is None else server.authorization_token.get_secret_value()
    fields = (at, "name", "url", "authorization_token", "authorization_token")
    resolved = rules.server_for(RequestedServer(fields, server.name, server.url, {}, token))
    # Calls need no approval, unless the operator configured approvals for this server.
    approval = Approval(otherwise=False) if resolved.approval == Approval() else resolved.approval
    allowed = (resolved.allowed or ToolFilter()) & enabled & ToolFilter(unasked=approval)
    return replace(resolved, label=server.name, owner=owner, allowed=allowed, approval=approval)


def _old_filter(configuration: ToolConfiguration | None) -> ToolFilter | None:
    if configuration is None:
        return ToolFilter()
    if configuration.enabled is False:
        return None
    return ToolFilter(None if configuration.allowed_tools is None else frozenset(configuration.allowed_tools))
