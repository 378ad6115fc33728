"""Ids of tool calls, as clients see them.

The gateway has one id per call for all APIs, which Messages shows with a different prefix. A client may continue a
session with another API, so every API accepts the ids of all APIs.
"""

from __future__ import annotations

from typing import Final

OURS: Final = "call_"
CLIENTS: Final = "toolu_"
# Prefix of the id of a call that the gateway made itself.
SERVERS: Final = "srvtoolu_"
# Prefix of the id of a call on a server that the request names.
MCP_SERVERS: Final = "mcptoolu_"


def gateway_id(call_id: str, prefix: str = CLIENTS) -> str:
    return prefix + call_id.removeprefix(OURS)


def known_id(client_id: str) -> str:
    """Convert the call id that a client sent to the id that the gateway uses inside."""
    for prefix in (CLIENTS, SERVERS, MCP_SERVERS):
        if client_id.startswith(prefix):
            return OURS + client_id.removeprefix(prefix)
    return client_id
