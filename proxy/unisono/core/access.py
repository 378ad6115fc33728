"""Who asks and what they may do: a key as it is kept, and the caller that a request with it comes from.

A key's plaintext is in none of these: a record knows it by digests, and everything else by the key's public id.
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
    """After how long a budget is full again: `none` for never, `day` and `month` by the calendar of UTC, `every` so
    many `seconds`, whole ones, counted from when the key was made."""

    kind: PeriodKind = "none"
    seconds: int = 0

    def window(self, now: float, since: float = 0.0) -> tuple[float, float | None]:
        """The period that `now` is in: where it begins, and where the next one does, None for never. All in seconds
        since 1970; `since` is where the first period of so many seconds began."""
        if self.kind == "none":
            return 0.0, None
        if self.kind == "every":
            begun = since + (now - since) // self.seconds * self.seconds
            return begun, begun + self.seconds
        first = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        if self.kind == "day":
            return first.timestamp(), (first + timedelta(days=1)).timestamp()
        first = first.replace(day=1)
        return first.timestamp(), (first + timedelta(days=32)).replace(day=1).timestamp()


NO_PERIOD = Period()


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may use; None for any amount. `rpm` and `tpm` are requests and tokens in any 60 seconds,
    `max_parallel` requests at once, `token_budget` tokens and `money_budget` micro-USD in each `budget_period`, of
    which the first began at `budget_since`, in seconds since 1970."""

    rpm: int | None = None
    tpm: int | None = None
    max_parallel: int | None = None
    token_budget: int | None = None
    money_budget: int | None = None
    budget_period: Period = NO_PERIOD
    budget_since: float = 0.0

    @property
    def limited(self) -> bool:
        """Whether there is one at all."""
        return any(
            limit is not None for limit in (self.rpm, self.tpm, self.max_parallel, self.token_budget, self.money_budget)
        )

    @property
    def has_budget(self) -> bool:
        return self.token_budget is not None or self.money_budget is not None


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request counts for. `tenant` owns what the request stores and separates it from other tenants' state.
    `key` is the public id of a virtual key, empty for the master key and for a gateway without keys. `models` are
    names clients may ask for and `mcp_servers` labels of the operator's tool servers, None for all of them; `raw` is
    the permission for completions that are not rendered here; `expires_at` in seconds since 1970."""

    tenant: str
    key: str = ""
    limits: KeyLimits = NO_LIMITS
    models: frozenset[str] | None = None
    mcp_servers: frozenset[str] | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    raw: bool = False
    expires_at: float | None = None

    def may_ask(self, *names: str) -> bool:
        """Whether one of the names a model goes by is allowed."""
        return self.models is None or any(name in self.models for name in names)


@dataclass(frozen=True, slots=True)
class KeyDigest:
    """One secret a key is known by: its keyed digest in hexadecimal, and until when it is good, None for ever."""

    digest: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A virtual key. `digests` has more than one while an earlier secret is still good; `ending` are the last letters
    of the newest, by which its owner recognises it. `revision` grows by one with every change and is the store's to
    set. What is not said of a field is as in `Caller`; times in seconds since 1970."""

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

    def good(self, now: float) -> bool:
        """Whether the key itself may be used."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class KeyStore(Protocol):
    """Where virtual keys are kept, those of all tenants together; `StoreUnavailable` may come of each."""

    async def put_key(self, record: KeyRecord) -> KeyRecord:
        """Keep a new key, of revision 0, or change the one that has the record's revision, and return it as it is now.
        From then on it is found by the digests of this record and by no earlier ones. Raises `NotFound`,
        `StoreConflict` (another key has the id or a digest, or the key was changed meanwhile)."""
        ...

    async def key(self, key: str) -> KeyRecord | None:
        """By its public id. Raises `StoreUnreadable`."""
        ...

    async def key_of(self, digest: str) -> KeyRecord | None:
        """The key that has this digest, whatever else is to be said of it. Raises `StoreUnreadable`."""
        ...

    async def keys(self) -> tuple[KeyRecord, ...]:
        """All of them, revoked ones too, the oldest first. Raises `StoreUnreadable`."""
        ...
