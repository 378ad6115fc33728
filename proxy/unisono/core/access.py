"""Access: virtual keys as they are stored, and the caller that a key identifies.

No type here holds a key's plaintext: a record knows it by digests, everything else by the key's public id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal, Protocol, TypeAlias

MASTER_TENANT = "default"
LOCAL_TENANT = "local"

PeriodKind: TypeAlias = Literal["none", "day", "month", "every"]


@dataclass(frozen=True, slots=True)
class Period:
    """Renewal period of a budget.

    `none` never renews, `day` and `month` follow the UTC calendar. `every` renews after that many whole `seconds`,
    counted from the creation of the key.
    """

    kind: PeriodKind = "none"
    seconds: int = 0

    def window(self, now: float, since: float = 0.0) -> tuple[float, float | None]:
        """Return the start of the period that contains `now` and of the next, None for never.

        All times are in seconds since 1970; `since` is the start of the first period of kind `every`.
        """
        if self.kind == "none":
            return 0.0, None
        if self.kind == "every":
            start = since + (now - since) // self.seconds * self.seconds
            return start, start + self.seconds
        # Calendar periods begin at midnight UTC on every replica, independent of the time zone of the machine.
        first = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        if self.kind == "day":
            return first.timestamp(), (first + timedelta(days=1)).timestamp()
        # Every month has at least 28 days, so 32 days after its first day lies in the next month.
        first = first.replace(day=1)
        return first.timestamp(), (first + timedelta(days=32)).replace(day=1).timestamp()


NO_PERIOD = Period()


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of a key; None for unlimited.

    `rpm` and `tpm` limit requests and tokens in any 60 seconds, `max_parallel` simultaneous requests. `token_budget`
    (tokens) and `money_budget` (micro-USD) apply to each `budget_period`. The first period began at `budget_since`, in
    seconds since 1970.
    """

    rpm: int | None = None
    tpm: int | None = None
    max_parallel: int | None = None
    token_budget: int | None = None
    money_budget: int | None = None
    budget_period: Period = NO_PERIOD
    budget_since: float = 0.0

    @property
    def limited(self) -> bool:
        """True if any limit is set."""
        return any(
            limit is not None for limit in (self.rpm, self.tpm, self.max_parallel, self.token_budget, self.money_budget)
        )

    @property
    def has_budget(self) -> bool:
        return self.token_budget is not None or self.money_budget is not None


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Caller:
    """Party that a request is attributed to.

    `tenant` owns the state that the request stores and separates it from other tenants' state. `key` is the public id
    of a virtual key, empty for the master key and for a gateway without keys. `models` are permitted client-side model
    names, `mcp_servers` permitted labels of configured tool servers; None permits all. `raw` permits completions that
    the gateway does not render. `expires_at` is in seconds since 1970.
    """

    tenant: str
    key: str = ""
    limits: KeyLimits = NO_LIMITS
    models: frozenset[str] | None = None
    mcp_servers: frozenset[str] | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    raw: bool = False
    expires_at: float | None = None

    def may_use_model(self, *names: str) -> bool:
        """Return True if one of the names of a model is permitted."""
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
    newest secret, by which its owner recognises it. `revision` grows by one with every change and is set by the store.
    Other fields are as in `Caller`; times are in seconds since 1970.
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
    revision: int = 0

    @property
    def caller(self) -> Caller:
        return Caller(
            tenant=self.tenant,
            key=self.id,
            limits=self.limits,
            models=self.models,
            mcp_servers=self.mcp_servers,
            tags=self.tags,
            raw=self.raw,
            expires_at=self.expires_at,
        )

    def is_valid(self, now: float) -> bool:
        """Return True if the key is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class KeyStore(Protocol):
    """Storage for the virtual keys of all tenants. Every method may raise `StoreUnavailable`."""

    async def put_key(self, record: KeyRecord) -> KeyRecord:
        """Store a new key (revision 0) or replace the one with the record's revision.

        Return the result. From then on, only the digests of this record find the key. Raises `NotFound`,
        `StoreConflict` (another key has the id or a digest, or the key was changed meanwhile).
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
