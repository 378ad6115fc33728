"""Construction of the MCP client, and of the rules for requests that use tool servers.

Part of the composition root. A gateway without tool servers does not import the MCP client.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import Final

from unisono.api.gateway_tools import allowed
from unisono.api.tool_server_rules import ServerRules
from unisono.config import Config
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.lru_cache import RecentEntries
from unisono.core.server_tool_arguments import ToolArguments
from unisono.core.tool_approvals import Approval, ToolFilter
from unisono.core.tool_host import LeftOutTool, Progress, ToolHost, ToolList, ToolOutcome, ToolServer, UserAnswer
from unisono.errors import ConfigError, InvalidRequest, ToolServerNotAllowed

# Maximum number of tool lists to remember, of tools in a log line, and of characters of a tool's name. They are limited
# because tool servers choose the names, and may change their lists at any time.
LOGGED_LISTS: Final = 512
LOGGED_TOOLS: Final = 8
LOGGED_NAME: Final = 64

log = logging.getLogger("unisono.tools")


class LeftOutTools:
    """Logger of tools that a server lists but the gateway does not offer to the model.

    The tools left out of a server's list are logged again only if they have changed.
    """

    def __init__(self) -> None:
        self._logged_tools: RecentEntries[tuple[str, tuple[tuple[str, str], ...]], None] = RecentEntries(LOGGED_LISTS)

    def __call__(self, server: str, tools: Sequence[LeftOutTool]) -> None:
        facts = (server, tuple((each.tool.name, each.reason) for each in tools))
        is_known = facts in self._logged_tools
        self._logged_tools.put(facts, None)
        if is_known:
            return
        names = ", ".join(f"{each.tool.name[:LOGGED_NAME]!r} ({each.reason})" for each in tools[:LOGGED_TOOLS])
        about = {"tool_server": server, "count": len(tools)}
        log.warning("tools of a tool server were left out: %s", names, extra=about)


@dataclass(frozen=True, slots=True)
class ServerToolSetup:
    """Client of tool servers (`host`), and rules for requests that use tool servers.

    `log_left_out` logs the tools that a server lists but the gateway does not offer to the model.
    """

    host: ToolHost
    rules: ServerRules = field(default_factory=ServerRules)
    log_left_out: LeftOutTools = field(default_factory=LeftOutTools)

    @property
    def configured(self) -> Mapping[str, ToolServer]:
        return self.rules.configured

    def servers_without_approval(self, labels: Collection[str] | None, caller: Caller) -> tuple[ToolServer, ...]:
        """Return the servers that a caller may use with a model without approval.

        Each server is limited to the tools that need no approval. `labels` are the servers that the model may use; None
        allows all servers. A server that implements a builtin tool is returned under the name of this tool.
        """
        if not self.rules.configured:
            return ()
        rules = self.rules.for_model(labels).for_caller(caller)
        named = {server.label for server in rules.trained.values()}
        others = [server for label, server in rules.configured.items() if label not in named]
        servers = (*others, *(allowed(server, builtin) for builtin, server in rules.trained.items()))
        # If the operator has set no policy for a server, every call needs approval. Chat Completions and Messages have
        # no way to ask for approval.
        return tuple(
            replace(server, allowed=(server.allowed or ToolFilter()) & ToolFilter(unasked=server.approval))
            for server in servers
            if server.approval != Approval()
        )


class NoTools(ToolHost):
    """Tool host of a gateway without tool servers. This host refuses every call."""

    async def start(self) -> None:
        """Do nothing."""

    async def list_tools(self, server: ToolServer, *, deadline: float | None = None) -> ToolList:
        raise ToolServerNotAllowed("This gateway has no tool servers.")

    async def call(
        self,
        server: ToolServer,
        tool: str,
        arguments: ToolArguments,
        *,
        deadline: float | None = None,
        progress: Progress | None = None,
        answer: UserAnswer | None = None,
        can_ask: bool = False,
    ) -> ToolOutcome:
        raise ToolServerNotAllowed("This gateway has no tool servers.")

    async def aclose(self) -> None:
        """Do nothing."""


def build_server_tools(config: Config) -> ServerToolSetup:
    """Build the client and the rules without contacting a server.

    Raises ConfigError for an unknown label, or for a header that cannot be sent.
    """
    hosts = config.unisono.mcp_allowed_hosts
    builtins = {str(builtin): label for builtin, label in config.unisono.builtin_tools.items()}
    for builtin, label in builtins.items():
        if label not in config.mcp_servers:
            raise ConfigError(
                f"unisono.builtin_tools.{builtin}: unknown tool server `{label}`; add it to `mcp_servers`"
            )
    if not config.mcp_servers and not hosts:
        return ServerToolSetup(NoTools())
    from unisono.mcp import McpHost, check_headers
    from unisono.net.ssrf_guard import SsrfGuard

    servers = {label: settings.server(label) for label, settings in config.mcp_servers.items()}
    # Report a header that cannot be sent at startup, not at the first call.
    for label, server in servers.items():
        try:
            check_headers(server.headers, server.authorization)
        except InvalidRequest as error:
            raise ConfigError(f"mcp_servers.{label}: {error.message}") from None
    guard = SsrfGuard([host.rule() for host in hosts])
    return ServerToolSetup(McpHost(guard), ServerRules(servers, builtins, guard.is_listed, check_headers))
