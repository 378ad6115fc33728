"""Small MCP servers that come along: `browser` and `python`, the two tools gpt-oss knows from its training.

They are servers like any other: the gateway reaches them through its configuration, and nothing of the gateway is
imported here. `serving` puts a server on a socket or on standard input and output.
"""
