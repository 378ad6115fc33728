"""Client side of the Model Context Protocol: implements `core.tool_host` for remote servers.

Importing this package is cheap: the protocol's SDK is loaded on the first connection to a server.
"""

from __future__ import annotations

from unisono.core.tool_host import ToolNames
from unisono.mcp.headers import check_headers
from unisono.mcp.host import McpHost
from unisono.mcp.limits import McpLimits

__all__ = ["McpHost", "McpLimits", "ToolNames", "check_headers"]
