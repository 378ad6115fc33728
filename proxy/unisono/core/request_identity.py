"""Ids of the current request for its trace spans: end user, response and conversation."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

from unisono.core.frozen import dataclass

# Maximum number of characters of an id that the client chooses.
MAX_ID_LENGTH: Final = 256


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """Ids of a request; empty if unknown."""

    user: str = ""
    response_id: str = ""
    conversation_id: str = ""


UNKNOWN: Final = RequestIdentity()
IDENTITY: ContextVar[RequestIdentity] = ContextVar("IDENTITY", default=UNKNOWN)


def identify(*, user: str | None = None, response_id: str | None = None, conversation_id: str | None = None) -> None:
    """Set ids of the current request; None leaves an id unchanged.

    The ids apply to generations that start later in this task. Ids of more than `MAX_ID_LENGTH` characters are
    truncated.
    """
    known = IDENTITY.get()
    IDENTITY.set(
        RequestIdentity(
            known.user if user is None else user[:MAX_ID_LENGTH],
            known.response_id if response_id is None else response_id[:MAX_ID_LENGTH],
            known.conversation_id if conversation_id is None else conversation_id[:MAX_ID_LENGTH],
        )
    )
