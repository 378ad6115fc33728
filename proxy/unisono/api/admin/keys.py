"""Routes `/key/*`: virtual keys in LiteLLM's format.

A request names a key by its secret, or by its id, which LiteLLM calls the token or the hash. Deleting a key revokes it
permanently; the usage stays attributed to the key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from fastapi import Query

from unisono.access.imported_keys import PREFIX
from unisono.access.keys import Issued, Mint, issued, key_record_has, new_key_id, revoked, rotated
from unisono.api.admin.administration import (
    ADMIN,
    AdminDeps,
    Administration,
    CurrentActor,
    IdempotencyKey,
    body_digest,
    creation_name,
    no_such,
    page_of,
)
from unisono.api.admin.budget_spend import carry_spend, key_spend
from unisono.api.admin.fields import seconds_of
from unisono.api.admin.key_lookup import alias_taken, claim_alias, find_key, list_visible
from unisono.api.admin.key_permissions import check_change, check_new_key
from unisono.api.admin.key_schema import (
    DeletedKeys,
    DeleteKeys,
    GeneratedKey,
    GenerateKey,
    KeyInfo,
    KeyObject,
    KeyPage,
    KeyQuery,
    KeyReference,
    KeySettings,
    RegenerateKey,
    UpdateKey,
    team_of,
)
from unisono.api.admin.roles import Actor
from unisono.api.answer_types import Object
from unisono.api.dependencies import ParsedBody, PathId
from unisono.api.route_table import BODY_404_409, READ_404
from unisono.core.access import KeyRecord
from unisono.core.conversation import Json
from unisono.core.directory import EntryKind
from unisono.errors import InvalidRequest, NotAllowed, StoreConflict, UnisonoError, UnsupportedValue


async def create_key(admin: Administration, actor: Actor, body: GenerateKey, once: str = "") -> dict[str, Json]:
    """Create a key and return it with its secret. A repeated request returns the same key.

    A request is repeated if it has the same body, and the same Idempotency-Key `once` or key alias. Raises
    `InvalidRequest` if another key has the alias, `KeyReused` if the Idempotency-Key was used with a different body,
    `NotFound` for an unknown team, user or budget, and `StoreConflict` if the key of the earlier request with the
    Idempotency-Key was deleted or received a new secret.
    """
    check_new_key(actor, is_raw=bool(body.raw))
    tenant, user = await _owner(admin, actor, body)
    fields = {name: getattr(body, name) for name in sorted(body.model_fields_set)}
    sent = body.model_dump(mode="json", include=set(fields))
    name = creation_name(actor, "key", once) if once else ""
    key_id = await admin.created_id(actor, "key", sent, once, new_key_id())
    if body.key_alias:
        key_id = await claim_alias(admin, body.key_alias, body_digest(actor, sent), key_id, is_fixed=bool(once))
    mint = await admin.mint()
    plaintext = mint.derived(f"{key_id} {once or body.key_alias}") if once or body.key_alias else ""
    taken: UnisonoError = alias_taken(body.key_alias or "")
    if once:
        taken = StoreConflict("The key of this request was deleted or has a new secret; use another Idempotency-Key.")
    if plaintext and (repeated := await _created_before(admin, mint, key_id, plaintext, taken)) is not None:
        return repeated
    now = admin.clock()
    new = issued(mint, now, tenant=tenant, key_id=key_id, plaintext=plaintext)
    record = body.applied(replace(new.record, user=user, created_by=actor.id, once=name), now)
    try:
        return created_answer(admin, replace(new, record=await store_new_key(admin, actor, record, "created")))
    except StoreConflict:
        # The same request was sent twice at the same time.
        repeated = await _created_before(admin, mint, key_id, plaintext, taken) if plaintext else None
        if repeated is None:
            raise
        return repeated


async def store_new_key(admin: Administration, actor: Actor, record: KeyRecord, action: str) -> KeyRecord:
    """Store a new key with its audit record.

    Raises `StoreConflict` if the key exists, and `NotFound` if its team or user was deleted after the caller's check.
    """
    stored = await admin.store.put_key(record, admin.audit_of(actor, action, None, record))
    owners = [each for each in ((EntryKind.TEAM, team_of(record) or ""), (EntryKind.USER, record.user)) if each[1]]
    for (kind, id), entry in zip(owners, await admin.store.entries(*owners), strict=True):
        if entry is None:
            await revoke_key(admin, actor, stored)
            raise no_such(kind, id, f"{kind}_id")
    return stored


async def _created_before(
    admin: Administration, mint: Mint, key_id: str, plaintext: str, taken: UnisonoError
) -> dict[str, Json] | None:
    """Return the answer of the earlier request that created the key, or None.

    Raises `taken` if the key has since been deleted or received a new secret.
    """
    existing = await admin.store.key(key_id)
    if existing is None:
        return None
    if existing.revoked_at is not None or not key_record_has(existing, mint, plaintext):
        raise taken
    return created_answer(admin, Issued(existing, plaintext))


async def _owner(admin: Administration, actor: Actor, body: GenerateKey) -> tuple[str, str]:
    """Return the team and the user of a new key.

    Raises `NotFound` for a team, user or budget that the actor may not use. Raises `NotAllowed` if the actor's key
    belongs to a team and the body names no team.
    """
    team, user = body.team_id or "", body.user_id or ""
    if actor.home is not None and not actor.changes_all and not team:
        raise NotAllowed(
            f"'team_id': a key that belongs to a team can create keys for this team only; send '{actor.home}'.",
            param="team_id",
        )
    if not actor.changes_all and not user and team not in actor.teams:
        user = actor.user
    named = ((EntryKind.TEAM, team), (EntryKind.USER, user), (EntryKind.BUDGET, body.budget_id or ""))
    wanted = [each for each in named if each[1]]
    for (kind, id), entry in zip(wanted, await admin.store.entries(*wanted), strict=True):
        may_use = entry is not None and actor.sees(entry)
        if kind is EntryKind.USER and entry is not None and team in actor.teams:
            # An admin of a team may create keys for the team's members.
            (found,) = await admin.store.entries((EntryKind.TEAM, team))
            may_use = may_use or (found is not None and id in found.members)
        if not may_use:
            raise no_such(kind, id, f"{kind}_id")
    return team, user


async def update_key(admin: Administration, actor: Actor, body: UpdateKey) -> KeyRecord:
    """Change those settings of a key that the body contains.

    Raises `NotFound` for a key, user or budget that is unknown or not accessible to the actor, and `NotAllowed` for
    changes that only an admin may make. Raises `InvalidRequest` if no key is named or another key has the alias, and
    `UnsupportedValue` for a different team.
    """
    if not body.key:
        raise InvalidRequest("Missing required field 'key'.", param="key")
    record = await find_key(admin, actor, body.key, to_change=True)
    if body.team_id is not None and body.team_id != team_of(record):
        raise UnsupportedValue(
            "'team_id': a key cannot change its team, which owns everything that the key stored; create a new key.",
            param="team_id",
        )
    return await _change_settings(admin, actor, record, "updated", body, lambda new: new)


async def _change_settings(
    admin: Administration,
    actor: Actor,
    record: KeyRecord,
    action: str,
    body: KeySettings,
    complete: Callable[[KeyRecord], KeyRecord],
) -> KeyRecord:
    """Change those settings of a key that the body contains.

    `complete` receives the changed record, and returns the record to store. `action` is the name of the change in audit
    records. Raises `NotFound` for a user or budget that is unknown or not accessible to the actor, `NotAllowed` for
    changes that only an admin may make, and `InvalidRequest` if another key has the alias.
    """
    wanted = body.applied(record, admin.clock())
    for kind, id, is_new in (
        (EntryKind.USER, wanted.user, wanted.user != record.user),
        (EntryKind.BUDGET, wanted.budget, wanted.budget != record.budget),
    ):
        if id and is_new and (not actor.changes_all or await admin.entry(kind, id) is None):
            raise no_such(kind, id, f"{kind}_id")
    # `change_key` checks the change again. A refused change must not have the side effects of the following lines.
    check_change(actor, record, wanted, await admin.budget_of(record))
    await carry_spend(admin, record, wanted)
    if wanted.name and wanted.name != record.name:
        owner = await claim_alias(admin, wanted.name, record.id, record.id, is_fixed=True)
        assert owner == record.id
    changed = await admin.change_key(actor, record.id, action, lambda was: complete(body.applied(was, admin.clock())))
    if record.name and changed.name != record.name:
        await admin.unclaim(f"alias {record.name}", record.id)
    return changed


async def delete_keys(admin: Administration, actor: Actor, body: DeleteKeys) -> list[str]:
    """Revoke keys permanently, and return the names by which the body identifies the keys.

    Raises `NotFound` if one of the keys does not exist or the actor may not change it. Then no key is revoked.
    """
    if not body.keys and not body.key_aliases:
        raise InvalidRequest("'keys': send at least one key in `keys`, or one alias in `key_aliases`.", param="keys")
    found = [await find_key(admin, actor, name, to_change=True, param="keys") for name in body.keys or ()]
    if body.key_aliases:
        live = {key.name: key for key in await admin.store.keys() if key.revoked_at is None and actor.changes_key(key)}
        for alias in body.key_aliases:
            if alias not in live:
                raise no_such("key", alias, "key_aliases")
            found.append(live[alias])
    for record in found:
        await revoke_key(admin, actor, record)
    return [*(body.keys or ()), *(body.key_aliases or ())]


async def revoke_key(admin: Administration, actor: Actor, record: KeyRecord) -> KeyRecord:
    gone = await admin.change_key(actor, record.id, "deleted", lambda was: revoked(was, admin.clock()))
    # The alias and the Idempotency-Key can be used again, for a new key with a different secret.
    await admin.unclaim(record.once, record.id)
    if record.name:
        await admin.unclaim(f"alias {record.name}", record.id)
    return gone


async def block_key(admin: Administration, actor: Actor, name: str, *, is_blocked: bool) -> KeyRecord:
    """Block or unblock a key. Raises `NotAllowed` if only an admin may unblock it."""
    record = await find_key(admin, actor, name, to_change=True)
    action = "blocked" if is_blocked else "unblocked"
    return await admin.change_key(actor, record.id, action, lambda was: replace(was, is_blocked=is_blocked))


async def regenerate_key(admin: Administration, actor: Actor, name: str, body: RegenerateKey) -> dict[str, Json]:
    """Give a key a new secret and the settings in the body; return the key with its secret.

    Raises the same errors as `update_key`.
    """
    record = await find_key(admin, actor, name, to_change=True)
    mint, latest = await admin.mint(), ""
    grace_s = 0.0 if body.grace_period is None else float(seconds_of(body.grace_period))

    def rotate(changed: KeyRecord) -> KeyRecord:
        # The change may run again after a conflict. Only the secret of the last run is stored.
        nonlocal latest
        if changed.revoked_at is not None:
            raise no_such("key", changed.id)
        new = rotated(changed, mint, admin.clock(), grace_s)
        latest = new.plaintext
        return new.record

    changed = await _change_settings(admin, actor, record, "rotated", body, rotate)
    return created_answer(admin, Issued(changed, latest))


def created_answer(admin: Administration, new: Issued) -> dict[str, Json]:
    return {"key": new.plaintext, **admin.view(new.record)}


# -- routes


@ADMIN.add("POST", "/key/generate", BODY_404_409, answer=GeneratedKey, body=GenerateKey)
async def generate_key_route(
    admin: AdminDeps, actor: CurrentActor, body: ParsedBody[GenerateKey], idempotency_key: IdempotencyKey = ""
) -> Object:
    """Create a virtual key; its secret is shown once."""
    return await create_key(admin, actor, body, idempotency_key)


@ADMIN.add("GET", "/key/info", READ_404)
async def get_key_info(admin: AdminDeps, actor: CurrentActor, key: Annotated[str | None, Query()] = None) -> KeyInfo:
    """Return a key, by default the key of this request."""
    if not key and actor.key is None:
        raise InvalidRequest("'key': the master key has no entry in the store; send the key to look up.", param="key")
    record = await find_key(admin, actor, key or (actor.key.id if actor.key else ""))
    shown = record.id if key is None or key.startswith(PREFIX) else key
    return KeyInfo(key=shown, info={**admin.view(record), **await key_spend(admin, record)})


@ADMIN.add("GET", "/key/list")
async def list_key_page(admin: AdminDeps, actor: CurrentActor, query: Annotated[KeyQuery, Query()]) -> KeyPage:
    """List the ids of keys, newest first; with `return_full_object`, whole keys and spend."""
    keys, counts = page_of(await list_visible(admin, actor, query), query.page, query.size)
    if not query.return_full_object:
        return KeyPage.model_validate({"keys": [key.id for key in keys], **counts})
    views = [{**admin.view(key), **await key_spend(admin, key)} for key in keys]
    return KeyPage.model_validate({"keys": views, **counts})


@ADMIN.add("POST", "/key/update", BODY_404_409, answer=KeyObject, body=UpdateKey)
async def update_key_route(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[UpdateKey]) -> Object:
    """Change the settings that the body contains; all other settings of the key stay."""
    record = await update_key(admin, actor, body)
    return {"key": record.id, **admin.view(record)}


@ADMIN.add("POST", "/key/delete", BODY_404_409, body=DeleteKeys)
async def delete_keys_route(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[DeleteKeys]) -> DeletedKeys:
    """Revoke keys permanently."""
    names = await delete_keys(admin, actor, body)
    return DeletedKeys(deleted_keys=["sk-..." if name.startswith(PREFIX) else name for name in names])


@ADMIN.add("POST", "/key/block", BODY_404_409, answer=KeyObject, body=KeyReference)
async def block_key_route(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[KeyReference]) -> Object:
    """Block a key until it is unblocked."""
    return admin.view(await block_key(admin, actor, body.key, is_blocked=True))


@ADMIN.add("POST", "/key/unblock", BODY_404_409, answer=KeyObject, body=KeyReference)
async def unblock_key_route(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[KeyReference]) -> Object:
    """Unblock a key."""
    return admin.view(await block_key(admin, actor, body.key, is_blocked=False))


@ADMIN.add("POST", "/key/regenerate", BODY_404_409, answer=GeneratedKey, body=RegenerateKey | None)
async def regenerate_key_route(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[RegenerateKey]) -> Object:
    """Give a key a new secret, which no later response contains."""
    name = body.key or (actor.key.id if actor.key else "")
    if not name:
        raise InvalidRequest("Missing required field 'key'.", param="key")
    return await regenerate_key(admin, actor, name, body)


@ADMIN.add("POST", "/key/{key}/regenerate", BODY_404_409, answer=GeneratedKey, body=RegenerateKey | None)
async def regenerate_named_key_route(
    admin: AdminDeps, actor: CurrentActor, key: PathId, body: ParsedBody[RegenerateKey]
) -> Object:
    """Give the key in the path a new secret, which no later response contains."""
    if body.key not in (None, key):
        raise InvalidRequest("'key': differs from the key in the path; omit this field.", param="key")
    return await regenerate_key(admin, actor, key, body)
