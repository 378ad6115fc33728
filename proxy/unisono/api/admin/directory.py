"""Operations on teams, users, end users and budgets: creation, change, deletion, members."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

from unisono.api.admin.administration import Administration, no_such, page_of, until_stored
from unisono.api.admin.budget_spend import carry_spend
from unisono.api.admin.entry_schema import ID_FIELDS, EntrySettings, ListQuery, TeamMember
from unisono.api.admin.fields import AdminBody
from unisono.api.admin.keys import revoke_key
from unisono.api.admin.limit_fields import LimitFields
from unisono.api.admin.roles import Actor, UserRole
from unisono.api.admin.user_emails import (
    change_email,
    claim_email,
    is_same_email,
    release_email,
    reserve_email,
    user_with_email,
)
from unisono.core.access import KeyRecord
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.errors import InvalidRequest, NotAllowed, StoreConflict, UnisonoError

# Default number of entries on a page.
PAGE_SIZE = 25
# Number of request records that one write deletes.
REQUESTS_PER_DELETION = 200
# Settings of a team that the team's own admin may change, and settings that users may change for themselves.
OWN_SETTINGS = frozenset({"team_id", "team_alias", "metadata", "user_id", "user_alias", "user_email"})


async def find_entry(
    admin: Administration, actor: Actor, kind: EntryKind, id: str, param: str | None = None
) -> DirectoryEntry:
    """Return the entry. Raises `NotFound` if it does not exist, or if the actor may not see it."""
    entry = await admin.entry(kind, id)
    if entry is None or not actor.sees(entry):
        raise no_such(kind, id, param or ID_FIELDS[kind])
    return entry


async def create_entry(
    admin: Administration,
    actor: Actor,
    kind: EntryKind,
    body: LimitFields,
    once: str = "",
    members: Mapping[str, str] | None = None,
) -> DirectoryEntry:
    """Create an entry, or return the entry that an earlier equal request has created.

    `once` is the Idempotency-Key; "" for none. Raises `InvalidRequest` if an entry with this id has different settings,
    `KeyReused` if the Idempotency-Key was used with a different body, `AlreadyExists` if another user has the email
    address, and `NotFound` for an unknown budget.
    """
    field = ID_FIELDS[kind]
    sent = body.model_dump(mode="json", include=set(body.model_fields_set))
    id = await admin.created_id(actor, kind, sent, once, getattr(body, field) or str(uuid4()))
    if isinstance(body, EntrySettings) and body.budget_id:
        await find_entry(admin, actor, EntryKind.BUDGET, body.budget_id)
    new = admin.new_entry(actor, kind, id, members=members or {})
    new = _applied(body, new, new.created_at)
    if kind is EntryKind.USER and not new.role:
        new = replace(new, role=UserRole.USER)
    # Users of earlier versions may share an address, so it is reserved for new users only.
    existing = await admin.entry(kind, id)
    if existing is None:
        if new.email:
            await reserve_email(admin, new.email, id)
        try:
            return await admin.store.put_entry(new, admin.audit_of(actor, "created", None, new))
        except StoreConflict:
            existing = await admin.entry(kind, id)
        if new.email and (existing is None or not is_same_email(existing.email, new.email)):
            await release_email(admin, new.email, id)
    if existing is None or _without_times(existing) != _without_times(new):
        raise InvalidRequest(
            f"'{field}': '{id[:64]}' exists with different settings; choose a different id, or update '{id[:64]}'.",
            param=field,
        )
    return existing


def _without_times(entry: DirectoryEntry) -> DirectoryEntry:
    limits = replace(entry.limits, budget_since=0.0)
    return replace(entry, created_at=0.0, updated_at=0.0, created_by="", revision=0, limits=limits, generation="")


def _applied(body: AdminBody, entry: DirectoryEntry, now: float) -> DirectoryEntry:
    if isinstance(body, EntrySettings):
        return body.applied(entry, now)
    assert isinstance(body, LimitFields)
    return replace(entry, limits=body.limits(entry.limits))


async def change_entry(
    admin: Administration,
    actor: Actor,
    entry: DirectoryEntry,
    action: str,
    change: Callable[[DirectoryEntry], DirectoryEntry],
) -> DirectoryEntry:
    """Change an entry and add the audit record; try again after a concurrent change.

    Raises `NotFound` if there is no such entry, and `StoreConflict` after `MAX_TRIES` attempts.
    """

    async def attempt() -> DirectoryEntry:
        was = await admin.entry(entry.kind, entry.id)
        if was is None:
            raise no_such(entry.kind, entry.id, ID_FIELDS[entry.kind])
        now = change(was)
        if now == was:
            return was
        now = replace(now, updated_at=admin.clock())
        return await admin.store.put_entry(now, admin.audit_of(actor, action, was, now))

    async with admin.lock(entry.kind, entry.id):
        return await until_stored(attempt)


async def set_blocked(
    admin: Administration, actor: Actor, entry: DirectoryEntry, *, is_blocked: bool
) -> DirectoryEntry:
    """Block or unblock a team or an end user."""
    action = "blocked" if is_blocked else "unblocked"
    return await change_entry(admin, actor, entry, action, lambda was: replace(was, is_blocked=is_blocked))


async def update_entry(
    admin: Administration, actor: Actor, kind: EntryKind, id: str, body: LimitFields
) -> DirectoryEntry:
    """Change those settings of an entry that the body contains.

    Raises `NotFound` if the actor may not see or change the entry, and `NotAllowed` for settings that only an admin may
    change. Raises `AlreadyExists` if another user has the email address.
    """
    entry = await find_entry(admin, actor, kind, id)
    may_change = actor.changes_team(entry) if kind is EntryKind.TEAM else actor.changes_user(entry)
    if not may_change:
        raise no_such(kind, id, ID_FIELDS[kind])
    if not actor.changes_all and (fields := sorted(body.model_fields_set - OWN_SETTINGS)):
        raise NotAllowed(f"'{fields[0]}': only an admin may change this setting.", param=fields[0])
    if isinstance(body, EntrySettings) and body.budget_id:
        await find_entry(admin, actor, EntryKind.BUDGET, body.budget_id)
    wanted = _applied(body, entry, admin.clock())
    await carry_spend(admin, entry, wanted)
    email = wanted.email
    is_new_email = await change_email(admin, entry, email)
    try:
        changed = await change_entry(admin, actor, entry, "updated", lambda was: _applied(body, was, admin.clock()))
    except UnisonoError:
        if is_new_email:
            await release_email(admin, email, id)
        raise
    if entry.email and not is_same_email(changed.email, entry.email):
        await release_email(admin, entry.email, id)
    return changed


async def check_unused(admin: Administration, budget: DirectoryEntry) -> None:
    """Raise `InvalidRequest` if a key, team, user or end user still uses the budget."""
    users = [
        (entry.kind.value, entry.id)
        for kind in EntryKind
        for entry in await admin.store.directory(kind)
        if entry.budget == budget.id
    ]
    keys = await admin.store.keys()
    users += [("key", key.id) for key in keys if key.revoked_at is None and key.budget == budget.id]
    for kind_name, id in users:
        raise InvalidRequest(
            f"'id': the {kind_name} '{id[:64]}' uses this budget; change the {kind_name} first.", param="id"
        )


async def delete_entries(
    admin: Administration, actor: Actor, kind: EntryKind, ids: Iterable[str], param: str
) -> list[str]:
    """Delete entries, and return their ids without duplicates.

    Raises `NotFound`, and deletes nothing, if an entry does not exist or the actor may not see it.
    """
    entries = [await find_entry(admin, actor, kind, id, param) for id in dict.fromkeys(ids)]
    for entry in entries:
        await delete_entry(admin, actor, entry)
    return [entry.id for entry in entries]


async def delete_entry(admin: Administration, actor: Actor, entry: DirectoryEntry) -> None:
    """Delete an entry. The keys of a team or a user are revoked.

    If a user is deleted, all data that identifies the user is removed from the keys, and the records of the user's
    requests are deleted. Raises `NotFound` or `StoreConflict` after concurrent changes.
    """
    await _revoke_keys_of(admin, actor, entry)
    if entry.kind is EntryKind.USER:
        for team in await admin.store.directory(EntryKind.TEAM):
            if entry.id in team.members:
                await change_members(admin, actor, team, remove=[entry.id])
    audit = admin.audit_of(actor, "deleted", entry, None)
    await admin.store.delete_entry(entry, audit)
    if entry.email:
        await release_email(admin, entry.email, entry.id)
    # Revoke the keys that were created meanwhile. A creation that is still in progress revokes its own key.
    await _revoke_keys_of(admin, actor, entry)


async def _revoke_keys_of(admin: Administration, actor: Actor, entry: DirectoryEntry) -> None:
    """Revoke the keys of a team or a user; remove data from them that identifies the user."""
    if entry.kind not in {EntryKind.TEAM, EntryKind.USER}:
        return
    for record in await admin.store.keys():
        is_users = entry.kind is EntryKind.USER and record.user == entry.id
        if is_users or (entry.kind is EntryKind.TEAM and record.tenant == entry.id):
            gone = record if record.revoked_at is not None else await revoke_key(admin, actor, record)
            if is_users:
                await admin.change_key(actor, gone.id, "anonymised", _anonymous)
                while await admin.store.delete_requests(gone.id, REQUESTS_PER_DELETION) == REQUESTS_PER_DELETION:
                    pass


def _anonymous(record: KeyRecord) -> KeyRecord:
    return replace(record, name="", user="", metadata={}, tags={})


async def change_members(
    admin: Administration,
    actor: Actor,
    team: DirectoryEntry,
    *,
    add: Mapping[str, str] | None = None,
    remove: Iterable[str] = (),
) -> DirectoryEntry:
    """Add and remove members of a team."""
    gone = frozenset(remove)

    def change(was: DirectoryEntry) -> DirectoryEntry:
        kept = {user: role for user, role in was.members.items() if user not in gone}
        return replace(was, members={**kept, **(add or {})})

    return await change_entry(admin, actor, team, "members_changed", change)


async def ensure_users(admin: Administration, actor: Actor, members: Iterable[TeamMember]) -> dict[str, str]:
    """Return the roles of members by user id, and create the users that do not exist yet."""
    roles: dict[str, str] = {}
    for member in members:
        email = member.user_email or ""
        id = member.user_id or await user_with_email(admin, email) or await claim_email(admin, email, str(uuid4()))
        roles[id] = member.role
        if await admin.entry(EntryKind.USER, id) is None:
            if email:
                await reserve_email(admin, email, id)
            user = admin.new_entry(actor, EntryKind.USER, id, email=email, role=UserRole.USER)
            audit = admin.audit_of(actor, "created", None, user)
            try:
                await admin.store.put_entry(user, audit)
            except StoreConflict:
                continue  # another request has created it
    return roles


def page_answer(name: str, items: list[dict[str, Any]], query: ListQuery) -> dict[str, Any]:
    """Return a page of a list in the format of LiteLLM's `/user/list`."""
    size = query.page_size or PAGE_SIZE
    page, counts = page_of(items, query.page, size)
    total = {"total": len(items), "page": query.page, "page_size": size, "total_pages": counts["total_pages"]}
    return {name: page, **total}
