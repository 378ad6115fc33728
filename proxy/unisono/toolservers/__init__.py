"""Small MCP servers included with the gateway: `browser` and `python`.

gpt-oss was trained on these two tools. They are configured in the gateway like any other MCP
server. They import nothing of the gateway itself. `transports` serves them over HTTP or on standard input and output.
"""
