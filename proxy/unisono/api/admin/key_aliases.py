"""Aliases of keys, which are unique among the keys of the admin API."""

from __future__ import annotations

from unisono.api.admin.administration import Administration
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
