"""Check for the addresses of tool servers that are named in requests."""

from __future__ import annotations

from typing import Final

from unisono.core.tool_host import ToolServer
from unisono.errors import ToolServerNotAllowed
from unisono.net.ssrf_guard import DestinationNotAllowed, DialTarget, SsrfGuard

NOT_ALLOWED: Final = (
    "The gateway may not connect to this tool server. The operator can add its host to `mcp_allowed_hosts`."
)


async def admit(server: ToolServer, guard: SsrfGuard) -> DialTarget | None:
    """Return the checked target of a server that a request named, None for a configured server.

    Raises `ToolServerNotAllowed` if the guard forbids the address. The error text is always the same, so that a client
    cannot use it to explore the network.
    """
    if server.configured:
        return None
    try:
        return await guard.check(server.url)
    except DestinationNotAllowed:
        raise ToolServerNotAllowed(NOT_ALLOWED) from None
