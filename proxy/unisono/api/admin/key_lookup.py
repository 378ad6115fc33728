"""Lookup of keys by secret, id or LiteLLM's hash; lists of keys; claims of unique aliases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from unisono.access.imported_keys import PREFIX, digest_of, to_digest
from unisono.access.keys import has_form
from unisono.api.admin.administration import Administration, no_such
from unisono.api.admin.fields import has_part
from unisono.api.admin.key_schema import KeyQuery, state_of, team_of
from unisono.api.admin.roles import Actor
from unisono.core.access import KeyRecord
from unisono.errors import InvalidRequest, KeyReused


async def claim_alias(admin: Administration, alias: str, digest: str, key_id: str, *, is_fixed: bool) -> str:
    """Claim an alias for a new key, and return the id of the key to create.

    The id is `key_id`, or the id from an earlier request with the same alias and `digest`. Raises `InvalidRequest` if a
    different key has the alias. With `is_fixed`, `InvalidRequest` is also raised if the id would not be `key_id`.
    """
    try:
        owner = await admin.claim(f"alias {alias}", digest, key_id)
    except KeyReused:
        raise alias_taken(alias) from None
    if owner != key_id and is_fixed:
        raise alias_taken(alias)
    if any(key.name == alias and key.id != owner and key.revoked_at is None for key in await admin.store.keys()):
        raise alias_taken(alias)
    return owner


async def check_alias(admin: Administration, alias: str, once: str, user: str | None) -> None:
    """Raise `InvalidRequest` if a key has this alias, unless an equal request created the key.

    An equal request created a key if the key has the creation name `once`, or belongs to `user` (ignored if None).
    """
    for key in await admin.store.keys():
        is_own = key.once == once or (user is not None and key.user == user)
        if key.name == alias and key.revoked_at is None and not is_own:
            raise alias_taken(alias)


def alias_taken(alias: str) -> InvalidRequest:
    message = f"'key_alias': another key has the alias '{alias[:64]}'; choose another alias, or update that key."
    return InvalidRequest(message, param="key_alias")


# Number of hexadecimal digits of a key's SHA-256 hash, which is LiteLLM's id of the key.
TOKEN_LENGTH: Final = 64


async def find_key(
    admin: Administration, actor: Actor, name: str, *, to_change: bool = False, param: str = "key"
) -> KeyRecord:
    """Return the key with this id, secret or LiteLLM hash.

    Raises `NotFound` if there is no such key, or if the actor may not see the key. With `to_change`, the actor must
    also be allowed to change the key. `param` is the field of the request that names the key.
    """
    record = await _stored_key(admin, name)
    is_visible = record is not None and (actor.changes_key(record) if to_change else actor.sees_key(record))
    if record is None or record.revoked_at is not None or not is_visible:
        # The error must not repeat a secret.
        raise no_such("key", "sk-..." if name.startswith(PREFIX) else name, param)
    return record


async def _stored_key(admin: Administration, name: str) -> KeyRecord | None:
    """Return the key with this id, secret or LiteLLM hash, even a revoked key."""
    if has_form(name):
        return await admin.store.key_of((await admin.mint()).digest(name))
    if name.startswith(PREFIX):
        return await admin.store.key_of(digest_of(name))
    if len(name) == TOKEN_LENGTH:
        return await admin.store.key_of(to_digest(name))
    return await admin.store.key(name)


async def key_id_of(admin: Administration, name: str | None) -> str | None:
    """Return the id of the key with this id, secret or LiteLLM hash.

    Returns `name` itself if there is no such key. The caller must check that the actor may see the key.
    """
    record = await _stored_key(admin, name) if name else None
    return name if record is None else record.id


async def list_visible(admin: Administration, actor: Actor, query: KeyQuery) -> list[KeyRecord]:
    """Return the keys that the actor may see and that match the query, in the query's order."""
    now = admin.clock()
    named = await key_id_of(admin, query.key_hash)
    wanted: dict[str, Callable[[KeyRecord], bool]] = {
        "user_id": lambda key: key.user == query.user_id,
        "team_id": lambda key: team_of(key) == query.team_id,
        "key_hash": lambda key: key.id == named,
        "key_alias": lambda key: key.name == query.key_alias,
        "search": lambda key: has_part(query.search, key.id, key.name),
    }
    filters = [matches for name, matches in wanted.items() if getattr(query, name) is not None]
    keys = [
        key
        for key in await admin.store.keys()
        if actor.sees_key(key)
        and (state_of(key, now) == query.status if query.status else key.revoked_at is None)
        and all(matches(key) for matches in filters)
    ]
    if query.sort_by == "key_alias":
        keys.sort(key=lambda key: key.name)
    return keys if query.sort_order == "asc" else keys[::-1]
