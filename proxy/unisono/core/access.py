"""Access: virtual keys as they are stored, and the caller that a key identifies.

No type here contains a key's plaintext. A `KeyRecord` contains digests of the secret; other types contain only the
public id of the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Protocol

from unisono.core.budget_period import NO_PERIOD
from unisono.core.conversation import Json
from unisono.core.directory import ADMIN_ROLE, VIEWER_ROLE, AuditRecord, DirectoryEntry, DirectoryStore, EntryKind
from unisono.core.frozen import dataclass
from unisono.core.quotas import NO_LIMITS, SHARED_TENANT, Account, KeyLimits
from unisono.core.route_protocol import NO_ROUTING, RequestedRouting

MASTER_TENANT = "default"
LOCAL_TENANT = "local"


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """Limits of the team or the user of a key, or of the end user of a request.

    `account` counts the usage. `is_counted`: usage is counted even if no limit is set.
    """

    account: Account
    limits: KeyLimits
    is_counted: bool = False


@dataclass(frozen=True, slots=True)
class Caller:
    """Party to which a request is attributed.

    `tenant` owns the state that the request stores; other tenants cannot read this state. `key` is the public id of a
    virtual key, and `key_name` its alias; both are empty for the master key and for a gateway without keys. `models`
    are the permitted model names, as clients use them, and access groups; `mcp_servers` are the permitted labels of
    configured tool servers. None permits all. `raw` permits completions of prompts that the gateway does not render.
    `expires_at` is in seconds since 1970, None for never. `guardrails` are the names of optional guardrails that the
    request selects, and `routing` is the routing that the request selects. `shared_limits` are the limits of the key's
    team, the key's user and the end user, `shared_models` are the permitted models of the team and the user, and
    `end_user_models` those of the end user. They apply in addition to the limits and permitted models of the key
    itself. `role` is the role of the key's user in the gateway; it is empty for a key of a team, which never has such a
    role.
    """

    tenant: str
    key: str = ""
    limits: KeyLimits = NO_LIMITS
    models: frozenset[str] | None = None
    mcp_servers: frozenset[str] | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    raw: bool = False
    expires_at: float | None = None
    guardrails: frozenset[str] = frozenset()
    routing: RequestedRouting = NO_ROUTING
    shared_limits: tuple[SharedLimits, ...] = ()
    shared_models: tuple[frozenset[str], ...] = ()
    key_name: str = ""
    role: str = ""
    end_user_models: frozenset[str] | None = None

    @property
    def is_operator(self) -> bool:
        """Return True for the master key, for an admin's key, and on a gateway without keys."""
        return not self.key or self.role == ADMIN_ROLE

    @property
    def sees_all(self) -> bool:
        """Return True if the caller may read everything about the gateway."""
        return self.is_operator or self.role == VIEWER_ROLE

    @property
    def is_limited(self) -> bool:
        is_limited = self.limits.limited
        if is_limited or not self.shared_limits:
            return is_limited
        return any(shared.limits.limited for shared in self.shared_limits)

    @property
    def is_restricted(self) -> bool:
        """Return True if any list of permitted models applies to the caller."""
        return self.models is not None or bool(self.shared_models) or self.end_user_models is not None

    def may_use_model(self, *names: str) -> bool:
        """Return True if a model is permitted; `names` are its name and its access groups.

        Every list of permitted models that applies to the caller must contain one of the names.
        """
        of_end_user = self.end_user_models
        return self.key_permits_model(*names) and (of_end_user is None or not of_end_user.isdisjoint(names))

    def key_permits_model(self, *names: str) -> bool:
        """Return True if the key permits a model, whichever end user the request names."""
        own = () if self.models is None else (self.models,)
        return all(any(name in permitted for name in names) for permitted in (*own, *self.shared_models))


@dataclass(frozen=True, slots=True)
class KeyDigest:
    """Keyed digest of a secret, in hexadecimal.

    `until` is the time at which the secret expires, in seconds since 1970; None for never.
    """

    digest: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """Virtual key.

    `digests` has more than one entry while an earlier secret is still valid. `ending` are the last characters of the
    newest secret, by which the owner can recognise the key. `user` is the id of the owner in the directory. `budget` is
    the id of a named budget, whose limits apply where `limits` sets no limit. `once` identifies the request that
    created the key, so that a repetition of this request creates no second key. The store increments `revision` with
    every change. Other fields are as in `Caller`; times are in seconds since 1970.
    """

    id: str
    tenant: str
    digests: tuple[KeyDigest, ...]
    created_at: float
    name: str = ""
    ending: str = ""
    expires_at: float | None = None
    revoked_at: float | None = None
    limits: KeyLimits = NO_LIMITS
    models: frozenset[str] | None = None
    mcp_servers: frozenset[str] | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    raw: bool = False
    user: str = ""
    budget: str = ""
    metadata: Mapping[str, Json] = field(default_factory=dict)
    is_blocked: bool = False
    updated_at: float = 0.0
    created_by: str = ""
    once: str = ""
    revision: int = 0

    @property
    def caller(self) -> Caller:
        return Caller(
            tenant=self.tenant,
            key=self.id,
            key_name=self.name,
            limits=self.limits,
            models=self.models,
            mcp_servers=self.mcp_servers,
            tags=self.tags,
            raw=self.raw,
            expires_at=self.expires_at,
        )

    def is_valid(self, now: float) -> bool:
        """Return True if the key is not revoked, blocked or expired; `now` is in seconds since 1970."""
        is_expired = self.expires_at is not None and now >= self.expires_at
        return self.revoked_at is None and not self.is_blocked and not is_expired


class KeyStore(Protocol):
    """Storage for the virtual keys of all tenants. Every method may raise `StoreUnavailable`."""

    async def put_key(self, record: KeyRecord, audit: AuditRecord | None = None) -> KeyRecord:
        """Store a new key if the record's revision is 0; else replace the stored key.

        The revision of the stored key must be that of the record. `audit` is added in the same operation. Returns the
        stored record with its new revision. From then on, `key_of` finds the key only by the digests of this record.
        Raises `NotFound` if the key to replace does not exist. Raises `StoreConflict` if a different key has the id or
        a digest, or if the stored key has a different revision.
        """
        ...

    async def key(self, key: str) -> KeyRecord | None:
        """Return the key with this public id, or None.

        Raises `StoreUnreadable` if the stored record cannot be read.
        """
        ...

    async def key_of(self, digest: str) -> KeyRecord | None:
        """Return the key with this digest, even a revoked or expired key; None if there is no key.

        Raises `StoreUnreadable` if the stored record cannot be read.
        """
        ...

    async def keys(self) -> tuple[KeyRecord, ...]:
        """Return all keys, including revoked keys, oldest first.

        Raises `StoreUnreadable` if a stored record cannot be read.
        """
        ...


class AccessStore(KeyStore, DirectoryStore, Protocol):
    """Storage for keys and for the directory."""


def shared_account(entry: DirectoryEntry) -> Account:
    """Return the account that counts the usage of a team, a user or an end user."""
    owner = f"{entry.kind} {entry.id}"
    return Account(SHARED_TENANT, f"{owner}\n{entry.generation}" if entry.generation else owner)


async def caller_with_shares(store: AccessStore, record: KeyRecord) -> Caller | None:
    """Return the caller of a key with the limits and models of its team and its user.

    Returns None if the team or the user is blocked. Raises the errors of `store.entries`.
    """
    wanted = [(EntryKind.TEAM, record.tenant)] if record.tenant != record.id else []
    wanted += [(EntryKind.USER, record.user)] if record.user else []
    own_budget = [(EntryKind.BUDGET, record.budget)] if record.budget else []
    if not wanted and not own_budget:
        return record.caller
    found = [entry for entry in await store.entries(*wanted, *own_budget) if entry is not None]
    owners = [entry for entry in found if entry.kind is not EntryKind.BUDGET]
    if any(owner.is_blocked for owner in owners):
        return None
    roles = [owner.role for owner in owners if owner.kind is EntryKind.USER and record.tenant == record.id]
    named = {owner.budget for owner in owners if owner.budget}
    further = await store.entries(*((EntryKind.BUDGET, budget) for budget in sorted(named))) if named else ()
    budgets = {entry.id: entry for entry in (*found, *further) if entry is not None and entry.kind is EntryKind.BUDGET}
    return replace(
        record.caller,
        limits=with_budget(record.limits, record.budget, budgets.get(record.budget)),
        shared_limits=tuple(
            SharedLimits(
                shared_account(owner),
                with_budget(owner.limits, owner.budget, budgets.get(owner.budget)),
            )
            for owner in owners
        ),
        shared_models=tuple(owner.models for owner in owners if owner.models is not None),
        role=next(iter(roles), ""),
    )


def with_budget(limits: KeyLimits, name: str, budget: DirectoryEntry | None) -> KeyLimits:
    """Return `limits`, completed by the limits of a named budget.

    A limit that `limits` sets takes precedence. If `limits` sets no budget period, and an amount of the named budget
    applies, the period of the named budget applies too. `name` is empty if no budget is named. `budget` is None if the
    store has no budget with this name.
    """
    if budget is None:
        # The budget was deleted just when a key or its owner began to use it. This must not remove all limits, so no
        # tokens are permitted.
        return replace(limits, token_budget=0) if name else limits
    names = ("rpm", "tpm", "max_parallel", "token_budget", "money_budget", "soft_budget")
    missing = {name: getattr(budget.limits, name) for name in names if getattr(limits, name) is None}
    # All budgets share one period. If the periods of a budget and a soft budget differ, that of the budget applies.
    is_budget_taken = any(missing.get(each) is not None for each in ("token_budget", "money_budget"))
    takes_period = is_budget_taken and limits.budget_period == NO_PERIOD
    has_own = limits.has_budget or (limits.soft_budget is not None and not budget.limits.has_budget)
    if has_own and not takes_period:
        return replace(limits, **missing)
    return replace(
        limits, **missing, budget_period=budget.limits.budget_period, budget_since=budget.limits.budget_since
    )
