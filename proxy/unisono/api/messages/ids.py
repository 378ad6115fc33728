"""Ids of calls as this API spells them; the gateway knows each call by one id, whichever API asks about it."""

from __future__ import annotations

from typing import Final

OURS: Final = "call_"
CLIENTS: Final = "toolu_"
SERVERS: Final = "srvtoolu_"
"""Before the id of a call that the gateway made itself."""


def shown_id(call_id: str, prefix: str = CLIENTS) -> str:
    return prefix + call_id.removeprefix(OURS)


def known_id(shown: str) -> str:
    """The call that a client means."""
    for prefix in (CLIENTS, SERVERS):
        if shown.startswith(prefix):
            return OURS + shown.removeprefix(prefix)
    return shown
