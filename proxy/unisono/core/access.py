"""Access: virtual keys as they are stored, and the caller that a key identifies.

No type here holds a key's plaintext: a record knows it by digests, everything else by the key's public id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from unisono.core.conversation import Json
from unisono.core.directory import AuditRecord
from unisono.core.quotas import NO_LIMITS, KeyLimits
from unisono.core.requested_routing import NO_ROUTING, RequestedRouting

MASTER_TENANT = "default"
LOCAL_TENANT = "local"


@dataclass(frozen=True, slots=True)
class Caller:
    """Party that a request is attributed to.

    `tenant` owns the state that the request stores and separates it from other tenants' state. `key` is the public id
    of a virtual key, empty for the master key and for a gateway without keys; `key_name` is its alias. `models` are
    permitted client-side model names and access groups, `mcp_servers` permitted labels of configured tool servers; None
    permits all. `raw` permits completions that the gateway does not render. `expires_at` is in seconds since 1970.
    `guardrails` are the names of guardrails that the request asks for besides those that always apply, `routing` is the
    routing that it asks for.
    """

    tenant: str
    key: str = ""
    key_name: str = ""
    limits: KeyLimits = NO_LIMITS
    models: frozenset[str] | None = None
    mcp_servers: frozenset[str] | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    raw: bool = False
    expires_at: float | None = None
    guardrails: frozenset[str] = frozenset()
    routing: RequestedRouting = NO_ROUTING

    def may_use_model(self, *names: str) -> bool:
        """Return True if one of the names or groups of a model is permitted."""
        return self.models is None or any(name in self.models for name in names)


@dataclass(frozen=True, slots=True)
class KeyDigest:
    """Secret of a key: its keyed digest in hexadecimal, and its expiry, None for none."""

    digest: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """Virtual key.

    `digests` has more than one entry while an earlier secret is still valid. `ending` are the last letters of the
    newest secret, by which its owner recognises it. `user` is the id of the owner in the directory, `budget` that of a
    named budget, which gives the limits that `limits` lacks. `once` names the request that created the key, so that its
    repetition creates no other. `revision` grows by one with every change and is set by the store. Other fields are as
    in `Caller`; times are in seconds since 1970.
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
        """Return True if the key is neither revoked nor blocked nor expired."""
        is_expired = self.expires_at is not None and now >= self.expires_at
        return self.revoked_at is None and not self.is_blocked and not is_expired


class KeyStore(Protocol):
    """Storage for the virtual keys of all tenants. Every method may raise `StoreUnavailable`."""

    async def put_key(self, record: KeyRecord, audit: AuditRecord | None = None) -> KeyRecord:
        """Store a new key (revision 0) or replace the one with the record's revision.

        Its audit record is added in the same operation. Return the result. From then on, only the
        digests of this record find the key. Raises `NotFound`, `StoreConflict` (another key has the id or a digest, or
        the key was changed meanwhile).
        """
        ...

    async def key(self, key: str) -> KeyRecord | None:
        """Return the key with this public id. Raises `StoreUnreadable`."""
        ...

    async def key_of(self, digest: str) -> KeyRecord | None:
        """Return the key that has this digest, even if it is revoked or expired.

        Raises `StoreUnreadable`.
        """
        ...

    async def keys(self) -> tuple[KeyRecord, ...]:
        """Return all keys, revoked ones too, oldest first. Raises `StoreUnreadable`."""
        ...
