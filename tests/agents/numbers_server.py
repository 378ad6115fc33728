"""MCP server with 200 tools on standard input and output: `number_1` to `number_200`; run as a script."""

from __future__ import annotations

from collections.abc import Callable

from mcp.server.mcpserver import MCPServer

TOOLS = 200


def square_of(number: int) -> Callable[[], str]:
    return lambda: f"number {number} is {number * number}"


if __name__ == "__main__":
    server = MCPServer("numbers")
    for number in range(1, TOOLS + 1):
        server.add_tool(square_of(number), name=f"number_{number}", description=f"Look up number {number}.")
    server.run()
