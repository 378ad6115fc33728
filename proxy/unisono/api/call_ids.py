"""Ids of tool calls inside the gateway and in the Messages API.

The gateway gives each call one id. Messages shows this id with a different prefix. A client may continue a session in a
different API, so every API accepts the call ids of all APIs.
"""

from __future__ import annotations

from typing import Final

# Prefix of call ids inside the gateway, in Chat Completions and in Responses. The other prefixes are those of Messages.
GATEWAY_PREFIX: Final = "call_"
# Prefix of the id of a call that the client runs.
CLIENT_TOOL_PREFIX: Final = "toolu_"
# Prefix of the id of a call that the gateway runs with a tool of its own.
SERVER_TOOL_PREFIX: Final = "srvtoolu_"
# Prefix of the id of a call that the gateway runs on an MCP server from the request.
MCP_TOOL_PREFIX: Final = "mcptoolu_"


def to_messages_id(call_id: str, prefix: str = CLIENT_TOOL_PREFIX) -> str:
    """Convert a call id of the gateway to the call id that Messages shows."""
    return prefix + call_id.removeprefix(GATEWAY_PREFIX)


def to_gateway_id(client_id: str) -> str:
    """Convert a call id from a client to the call id of the gateway; other ids are unchanged."""
    for prefix in (CLIENT_TOOL_PREFIX, SERVER_TOOL_PREFIX, MCP_TOOL_PREFIX):
        if client_id.startswith(prefix):
            return GATEWAY_PREFIX + client_id.removeprefix(prefix)
    return client_id
