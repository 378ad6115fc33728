"""Directory of teams, users, budgets and models, and audit records of all changes.

Changes of keys have audit records too. A team is a tenant with an entry: its keys share stored state and the limits of
the entry. A model entry is one deployment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Protocol

from unisono.core.conversation import Json
from unisono.core.frozen import dataclass
from unisono.core.quotas import NO_LIMITS, KeyLimits


class EntryKind(StrEnum):
    TEAM = "team"
    USER = "user"
    BUDGET = "budget"
    # End user of a client application, by the name that requests send.
    CUSTOMER = "customer"
    # Fact about the gateway that its processes share.
    SETTING = "setting"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """Team, user, end user, named budget or deployment of a model.

    `models` are permitted model names, None for all. `members` of a team are user ids with their role in it. `role` is
    the role of a user in the gateway. `budget` is the id of a named budget, which gives the limits that `limits` lacks.
    The id of a model entry is the name of the deployment, `alias` its `model_name`, and `is_blocked` means that it is
    drained. `metadata` holds its sealed settings, or nothing for a deployment of the configuration file.
    `revision` grows by one with every change and is set by the store. Times are in seconds since 1970.
    """

    kind: EntryKind
    id: str
    created_at: float
    updated_at: float = 0.0
    alias: str = ""
    email: str = ""
    role: str = ""
    limits: KeyLimits = NO_LIMITS
    models: frozenset[str] | None = None
    members: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Json] = field(default_factory=dict)
    budget: str = ""
    created_by: str = ""
    is_blocked: bool = False
    revision: int = 0


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """Change of a key or of an entry of the directory.

    `actor` is the id of the key that made the change, or the name of the master key. `before` and `after` are the
    object in the format of the admin API, None if there is none. `at` is in seconds since 1970.
    """

    id: str
    at: float
    actor: str
    action: str
    kind: str
    object_id: str
    before: Mapping[str, Json] | None = None
    after: Mapping[str, Json] | None = None


# Audit records that a store retains; the oldest are dropped.
MAX_AUDIT_RECORDS = 100_000


class DirectoryStore(Protocol):
    """Storage for the directory and the audit records.

    Every method may raise `StoreUnavailable`.
    """

    async def put_entry(self, entry: DirectoryEntry, audit: AuditRecord | None = None) -> DirectoryEntry:
        """Store a new entry (revision 0) or replace the one with the entry's revision.

        Its audit record is added in the same operation. Return the result. Raises `NotFound`, `StoreConflict`
        (the id exists, or the entry was changed meanwhile).
        """
        ...

    async def delete_entry(self, entry: DirectoryEntry, audit: AuditRecord | None = None) -> None:
        """Delete the entry with this revision. Raises `NotFound`, `StoreConflict`."""
        ...

    async def entries(self, *ids: tuple[EntryKind, str]) -> tuple[DirectoryEntry | None, ...]:
        """Return the entries in the order of `ids`, None for each missing one.

        Raises `StoreUnreadable`.
        """
        ...

    async def directory(self, kind: EntryKind) -> tuple[DirectoryEntry, ...]:
        """Return all entries of a kind, oldest first. Raises `StoreUnreadable`."""
        ...

    async def audit_records(self, offset: int, limit: int) -> tuple[int, Sequence[AuditRecord]]:
        """Return the number of all audit records, and a page of them, newest first."""
        ...
