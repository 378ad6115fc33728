"""Small MCP servers included with the gateway: `browser` and `python`.

gpt-oss was trained on these two tools. They run as separate processes, and are configured in the gateway like any other
MCP server. `transports` serves them over HTTP or on standard input and output.
"""
