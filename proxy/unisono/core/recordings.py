"""Recordings of answers and their store protocol. Like all state, a recording has a tenant."""

from __future__ import annotations

from typing import Protocol

from unisono.core.frozen import dataclass


@dataclass(frozen=True, slots=True)
class StoredTrace:
    """One recording.

    `about` is the summary for lists, and `document` is the whole recording. Stores do not interpret these bytes. `at`
    is the time of the recording in seconds since 1970.
    """

    tenant: str
    id: str
    at: float
    about: bytes = b""
    document: bytes = b""


class TraceStore(Protocol):
    """Storage for recordings. Every method may raise `StoreUnavailable`."""

    async def keep_traces(self, *traces: StoredTrace, for_s: float, most: int) -> None:
        """Store recordings for `for_s` seconds.

        If a tenant has more than `most` recordings, the oldest are dropped. A recording replaces an earlier recording
        with the same id.
        """
        ...

    async def trace(self, tenant: str, id: str) -> StoredTrace | None: ...

    async def traces(self, tenant: str, limit: int = 20) -> tuple[StoredTrace, ...]:
        """Return the newest `limit` recordings, without their documents, newest first."""
        ...
