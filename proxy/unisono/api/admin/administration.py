"""Operations that all admin routes share: actors, audited changes and idempotent creation.

The commands of `unisono keys` use the same operations as the routes.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from datetime import UTC, tzinfo
from secrets import token_hex
from typing import Annotated, Any, Final, TypeVar
from weakref import WeakValueDictionary

import orjson
from fastapi import Depends, Header
from starlette.requests import Request

from unisono.access.keys import Mint
from unisono.api.admin.entry_schema import entry_view
from unisono.api.admin.key_permissions import check_change
from unisono.api.admin.key_schema import key_view, team_of
from unisono.api.admin.roles import PERMISSIONS, Actor, MemberRole, Role, strongest
from unisono.api.dependencies import check_query, provided
from unisono.api.route_table import RouteTable, dependency, route_of
from unisono.core.access import LOCAL_TENANT, MASTER_TENANT, Caller, KeyRecord
from unisono.core.conversation import Json
from unisono.core.directory import AuditRecord, DirectoryEntry, EntryKind
from unisono.core.frozen import dataclass
from unisono.core.quotas import SHARED_TENANT, KeyLimits
from unisono.core.state_store import Store
from unisono.errors import InvalidRequest, KeyReused, NotAllowed, NotFound, StoreConflict

ADMIN = RouteTable("admin", prefixes=("",))
# Maximum number of attempts to change an object that other processes change at the same time.
MAX_TRIES: Final = 20
# Tenants that do not belong to a team. A key without a team is a tenant with the id of the key.
OTHER_TENANTS: Final = re.compile(rf"{MASTER_TENANT}|{LOCAL_TENANT}|key_[0-9a-f]{{24}}")

Item = TypeVar("Item")
Stored = TypeVar("Stored")
Viewed = KeyRecord | DirectoryEntry


@dataclass(frozen=True, slots=True)
class Administration:
    """Store and clock of the admin API.

    `salt` returns the gateway's secret, and `clock` the Unix time in seconds. If `is_keyless` is True, the gateway has
    no master key, so that virtual keys would have no effect. `zone` is the time zone of budget periods.
    """

    store: Store
    salt: Callable[[], Awaitable[bytes]]
    clock: Callable[[], float]
    is_keyless: bool = False
    zone: tzinfo = UTC
    locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def lock(self, kind: str, id: str) -> asyncio.Lock:
        """Return the lock of the object `id` of a kind, such as `team`.

        With this lock, changes to the object by this process wait for each other, so they cause no store conflicts.
        """
        return self.locks.setdefault((kind, id), asyncio.Lock())

    async def mint(self) -> Mint:
        return Mint(await self.salt())

    async def actor(self, caller: Caller) -> Actor:
        """Return the caller as an Actor, with the current role of the user of its key.

        Raises `NotAllowed` if the key is not in the store, and `StoreUnavailable` if the store cannot be reached.
        """
        if not caller.key:
            return Actor(Role.MASTER)
        record = await self.store.key(caller.key)
        if record is None:
            raise NotAllowed(
                "This key may not use the admin API, because it is not in the gateway's store; use the master key, or "
                "a key that the admin API or `unisono keys` has created."
            )
        user = await self.entry(EntryKind.USER, record.user) if record.user else None
        if user is None or user.is_blocked:
            return Actor(Role.KEY, record)
        home = team_of(record)
        teams = [
            team
            for team in await self.store.directory(EntryKind.TEAM)
            if user.id in team.members and home in (None, team.id)
        ]
        administered = frozenset(team.id for team in teams if team.members[user.id] == MemberRole.ADMIN)
        role = strongest(user, administered, home)
        administered = administered if role is Role.TEAM_ADMIN else frozenset()
        return Actor(role, record, user.id, administered, frozenset(team.id for team in teams), home)

    def new_entry(self, actor: Actor, kind: EntryKind, id: str, **fields: Any) -> DirectoryEntry:
        """Return a new team, user, end user or budget.

        The entry has its own account, even if a deleted entry had the same id. Raises `InvalidRequest` for a team with
        the id of another tenant: its keys could read and change everything that this tenant has stored.
        """
        if kind is EntryKind.TEAM and OTHER_TENANTS.fullmatch(id):
            raise InvalidRequest(
                f"'team_id': '{id}' is reserved for requests with the master key, without a key or with a key of this "
                "id; choose a different id.",
                param="team_id",
            )
        now = self.clock()
        return DirectoryEntry(
            kind,
            id,
            now,
            limits=KeyLimits(budget_since=now),
            created_by=actor.id,
            generation=token_hex(8),
            **fields,
        )

    async def entry(self, kind: EntryKind, id: str) -> DirectoryEntry | None:
        (found,) = await self.store.entries((kind, id))
        return found

    async def budget_of(self, record: KeyRecord) -> DirectoryEntry | None:
        """Return the named budget of a key, or None if the key has no named budget."""
        return await self.entry(EntryKind.BUDGET, record.budget) if record.budget else None

    def audit(
        self,
        actor: Actor,
        action: str,
        kind: str,
        object_id: str,
        before: Mapping[str, Json] | None,
        after: Mapping[str, Json] | None,
    ) -> AuditRecord:
        return AuditRecord(f"audit_{token_hex(12)}", self.clock(), actor.id, action, kind, object_id, before, after)

    def view(self, shown: Viewed) -> dict[str, Json]:
        """Return a key, team, user, end user or budget in LiteLLM's format."""
        if isinstance(shown, KeyRecord):
            return key_view(shown, self.clock(), self.zone)
        return entry_view(shown, self.clock(), self.zone)

    def audit_of(self, actor: Actor, action: str, before: Viewed | None, after: Viewed | None) -> AuditRecord:
        """Return the audit record of a change.

        `before` is None if the object was created, and `after` is None if the object was deleted.
        """
        changed = after or before
        assert changed is not None
        kind = "key" if isinstance(changed, KeyRecord) else changed.kind
        views = [None if each is None else self.view(each) for each in (before, after)]
        return self.audit(actor, action, kind, changed.id, *views)

    async def change_key(
        self, actor: Actor, key: str, action: str, change: Callable[[KeyRecord], KeyRecord]
    ) -> KeyRecord:
        """Change a key and add the audit record; try again after a concurrent change.

        Raises `NotFound` if there is no such key, `NotAllowed` for a change that the actor may not make, and
        `StoreConflict` after `MAX_TRIES` attempts.
        """

        async def attempt() -> KeyRecord:
            was = await self.store.key(key)
            if was is None:
                raise no_such("key", key)
            now = change(was)
            # Every change passes this check, whichever route makes it.
            check_change(actor, was, now, await self.budget_of(was))
            # A write without a change would only cause conflicts with concurrent changes.
            if now == was:
                return was
            now = replace(now, updated_at=self.clock())
            return await self.store.put_key(now, self.audit_of(actor, action, was, now))

        async with self.lock("key", key):
            return await until_stored(attempt)

    async def claim(self, name: str, digest: str, candidate: str) -> str:
        """Bind a name to the digest of a request body, and return the id of the object to create.

        On the first use of the name, the id is `candidate`. On later uses, it is the id from the first use. Raises
        `KeyReused` if the name was used before with a different digest.
        """
        return await self.store.claim(SHARED_TENANT, f"admin:{name}", digest, candidate)

    async def unclaim(self, name: str, id: str) -> None:
        if name:
            await self.store.unclaim(SHARED_TENANT, f"admin:{name}", id)

    async def created_id(self, actor: Actor, kind: str, body: Mapping[str, Any], once: str, candidate: str) -> str:
        """Return the id of the object that an Idempotency-Key creates: `candidate` on first use.

        `once` is the Idempotency-Key; "" if the request has none. Raises `KeyReused` if the Idempotency-Key was used
        before with a different body.
        """
        if not once:
            return candidate
        try:
            return await self.claim(creation_name(actor, kind, once), body_digest(actor, body), candidate)
        except KeyReused:
            raise KeyReused("This Idempotency-Key was already used with a different body; use a new one.") from None


async def until_stored(attempt: Callable[[], Awaitable[Stored]]) -> Stored:
    """Call `attempt`, which reads and changes an object, again after each concurrent change.

    `attempt` raises `StoreConflict` if another process has changed the object meanwhile. If the last of `MAX_TRIES`
    calls raises `StoreConflict`, the error is raised.
    """
    for _ in range(MAX_TRIES - 1):
        with suppress(StoreConflict):
            return await attempt()
    return await attempt()


def creation_name(actor: Actor, kind: str, once: str) -> str:
    """Return the name under which an Idempotency-Key is stored, which does not reveal the key."""
    return hashlib.sha256(orjson.dumps([kind, actor.id, once])).hexdigest()


def body_digest(actor: Actor, body: Mapping[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps([actor.id, dict(body)], option=orjson.OPT_SORT_KEYS)).hexdigest()


def no_such(kind: str, id: str, param: str | None = None) -> NotFound:
    """Return the error for an unknown object, or for one that the actor may not see."""
    return NotFound(f"There is no {kind} '{id[:64]}'.", param=param or kind)


def page_of(items: Sequence[Item], page: int, size: int | None) -> tuple[Sequence[Item], dict[str, Json]]:
    """Return a page of a list, and LiteLLM's fields that describe the page.

    The first `page` is 1. If `size` is None, one page contains all items.
    """
    size = max(len(items), 1) if size is None else size
    start = (page - 1) * size
    pages = -(-len(items) // size)
    return items[start : start + size], {"total_count": len(items), "current_page": page, "total_pages": pages}


async def _actor(request: Request) -> Actor:
    """Return the actor of a request.

    The checks run in this order. Raises `InvalidRequest` for a change if the gateway has no master key, `NotAllowed` if
    the actor's role may not use the route, and `UnsupportedValue` for an unknown query parameter.
    """
    admin = dependency(request, Administration)
    if admin.is_keyless and request.method not in {"GET", "HEAD"}:
        raise InvalidRequest(
            "Without a master key, keys, teams and users would have no effect: set 'general_settings.master_key' first."
        )
    actor = await admin.actor(request.state.caller)
    if actor.role not in PERMISSIONS.get(route_of(request.scope), frozenset()):
        raise NotAllowed(f"A key with the role '{actor.role}' may not use {route_of(request.scope)}.")
    await check_query(request)
    return actor


AdminDeps = Annotated[Administration, provided(Administration)]
CurrentActor = Annotated[Actor, Depends(_actor)]
IdempotencyKey = Annotated[str, Header(description="Creates the object once, however often the request is repeated.")]
