"""Recordings of answers, and the port they are kept behind. Like all state they belong to a tenant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoredTrace:
    """One recording. `about` is what a list shows of it and `document` all of it, opaque bytes both; `at` in seconds
    since 1970."""

    tenant: str
    id: str
    at: float
    about: bytes = b""
    document: bytes = b""


class TraceStore(Protocol):
    """Where recordings are kept; `StoreUnavailable` may come of each."""

    async def keep_traces(self, *traces: StoredTrace, for_s: float, most: int) -> None:
        """Keep each for so many seconds, and of each tenant no more than `most`: those that were kept first go. One of
        the same id takes the place of the one before."""
        ...

    async def trace(self, tenant: str, id: str) -> StoredTrace | None: ...

    async def traces(self, tenant: str, limit: int = 20) -> tuple[StoredTrace, ...]:
        """Those kept last, without their documents, the newest first."""
        ...
