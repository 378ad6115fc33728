"""Directory of teams, users, budgets and models, and audit records of all changes.

Changes to keys have audit records too. A team is a tenant that has an entry in the directory. The keys of a team share
stored state and the limits of this entry. A model entry is one deployment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Final, Protocol

from unisono.core.conversation import Json
from unisono.core.frozen import dataclass
from unisono.core.quotas import NO_LIMITS, KeyLimits

# Roles of a user that concern the whole gateway, by LiteLLM's names.
ADMIN_ROLE: Final = "proxy_admin"
VIEWER_ROLE: Final = "proxy_admin_viewer"


class EntryKind(StrEnum):
    TEAM = "team"
    USER = "user"
    BUDGET = "budget"
    # End user of a client application, identified by the name in requests.
    CUSTOMER = "customer"
    # Fact about the gateway that all of its processes share.
    SETTING = "setting"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """Team, user, end user, named budget or deployment of a model.

    `models` are the permitted model names, None for all. `members` of a team maps user ids to their roles in the team.
    `role` is the role of a user in the gateway. `budget` is the id of a named budget, whose limits apply where `limits`
    sets no limit. `generation` distinguishes the entry from deleted entries with the same id, so that they share no
    account; it is empty for entries of earlier versions. The store increments `revision` with every change. Times are
    in seconds since 1970.

    In a model entry, `id` is the name of the deployment, `alias` is its `model_name`, and `is_blocked` means that the
    deployment is drained. `metadata` contains its sealed settings; for a deployment of the configuration file, it is
    empty.
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
    generation: str = ""


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """Change to a key or to an entry of the directory.

    `actor` is the id of the key that made the change, or the name of the master key. `before` and `after` are the
    object before and after the change, in the format of the admin API; None if the object did not exist. `at` is in
    seconds since 1970.
    """

    id: str
    at: float
    actor: str
    action: str
    kind: str
    object_id: str
    before: Mapping[str, Json] | None = None
    after: Mapping[str, Json] | None = None


# Number of audit records that a store retains. Beyond it, the oldest records are dropped.
MAX_AUDIT_RECORDS = 100_000


class DirectoryStore(Protocol):
    """Storage for the directory and the audit records.

    Every method may raise `StoreUnavailable`.
    """

    async def put_entry(self, entry: DirectoryEntry, audit: AuditRecord | None = None) -> DirectoryEntry:
        """Store a new entry if its revision is 0; otherwise replace the stored entry.

        The revision of the stored entry must be that of `entry`. `audit` is added in the same operation. Returns the
        stored entry with its new revision. Raises `NotFound` if the entry to replace does not exist. Raises
        `StoreConflict` if a new entry's id exists already, or if the stored entry has a different revision.
        """
        ...

    async def delete_entry(self, entry: DirectoryEntry, audit: AuditRecord | None = None) -> None:
        """Delete the entry, and add `audit` in the same operation.

        Raises `NotFound` if the entry does not exist, and `StoreConflict` if it has a different revision.
        """
        ...

    async def entries(self, *ids: tuple[EntryKind, str]) -> tuple[DirectoryEntry | None, ...]:
        """Return the entries in the order of `ids`, with None for each missing entry.

        Raises `StoreUnreadable` if a stored entry cannot be read.
        """
        ...

    async def directory(self, kind: EntryKind) -> tuple[DirectoryEntry, ...]:
        """Return all entries of a kind, oldest first.

        Raises `StoreUnreadable` if a stored entry cannot be read.
        """
        ...

    async def audit_records(self, offset: int, limit: int) -> tuple[int, Sequence[AuditRecord]]:
        """Return the number of all audit records, and one page of the records, newest first.

        The page skips the newest `offset` records and contains at most `limit` records.
        """
        ...
