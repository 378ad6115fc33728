"""Ids of the current request for its spans: end user, response and conversation."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final

# Maximum characters of an id that the client chooses.
MAX_ID_LENGTH: Final = 256


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """Ids of a request; empty if unknown."""

    user: str = ""
    response_id: str = ""
    conversation_id: str = ""


UNKNOWN: Final = RequestIdentity()
IDENTITY: ContextVar[RequestIdentity] = ContextVar("IDENTITY", default=UNKNOWN)


def identify(**ids: str) -> None:
    """Set ids of the current request, for the generations that start after it in this task."""
    IDENTITY.set(replace(IDENTITY.get(), **{name: value[:MAX_ID_LENGTH] for name, value in ids.items()}))
