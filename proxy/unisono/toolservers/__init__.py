"""Small MCP servers included with the gateway: `browser` and `python`.

gpt-oss was trained on these two tools. The gateway reaches them through its configuration, as any other server. They
import nothing of the gateway itself. `transports` serves them over HTTP or on standard input and output.
"""
