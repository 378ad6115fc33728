"""Call ids in this API's spelling. The gateway has one id per call for all APIs."""

from __future__ import annotations

from typing import Final

OURS: Final = "call_"
CLIENTS: Final = "toolu_"
# Prefix of the id of a call that the gateway made itself.
SERVERS: Final = "srvtoolu_"


def gateway_id(call_id: str, prefix: str = CLIENTS) -> str:
    return prefix + call_id.removeprefix(OURS)


def known_id(client_id: str) -> str:
    """Convert a client's call id to the gateway's."""
    for prefix in (CLIENTS, SERVERS):
        if client_id.startswith(prefix):
            return OURS + client_id.removeprefix(prefix)
    return client_id
