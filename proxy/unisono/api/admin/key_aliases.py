"""Aliases of keys, which are unique among the keys of the admin API."""

from __future__ import annotations

from unisono.api.admin.administration import Administration
from unisono.errors import InvalidRequest, KeyReused


async def claim_alias(admin: Administration, alias: str, digest: str, key_id: str, *, is_fixed: bool) -> str:
    """Return the id of the key that this alias creates.

    Raises `InvalidRequest` if another key has the alias.
    """
    try:
        owner = await admin.claim(f"alias {alias}", digest, key_id)
    except KeyReused:
        raise _alias_taken(alias) from None
    if owner != key_id and is_fixed:
        raise _alias_taken(alias)
    if any(key.name == alias and key.id != owner and key.revoked_at is None for key in await admin.store.keys()):
        raise _alias_taken(alias)
    return owner


async def check_alias(admin: Administration, alias: str, once: str, user: str | None) -> None:
    """Raise `InvalidRequest` if a key of another request has this alias.

    The key of an earlier equal request belongs to the user, or was created with the same Idempotency-Key.
    """
    for key in await admin.store.keys():
        is_own = key.once == once or (user is not None and key.user == user)
        if key.name == alias and key.revoked_at is None and not is_own:
            raise _alias_taken(alias)


def _alias_taken(alias: str) -> InvalidRequest:
    message = f"'key_alias': another key has the alias '{alias[:64]}'; choose another, or update that key."
    return InvalidRequest(message, param="key_alias")
