"""The client side of the Model Context Protocol: tools of other servers, listed and called, behind `core.tools`.

Importing this package is cheap: the protocol's SDK is loaded when the first server is talked to.
"""

from __future__ import annotations

from unisono.core.tool_names import ToolNames
from unisono.mcp.headers import check_headers
from unisono.mcp.host import McpHost
from unisono.mcp.limits import McpLimits

__all__ = ["McpHost", "McpLimits", "ToolNames", "check_headers"]
