"""Email addresses of users.

An address belongs to at most one user. Upper and lower case do not matter, as in LiteLLM.
"""

from __future__ import annotations

from unisono.api.admin.administration import Administration
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.errors import AlreadyExists, InvalidRequest


def is_same_email(one: str, other: str) -> bool:
    return _normal(one) == _normal(other)


def _normal(email: str) -> str:
    return email.strip().casefold()


async def user_with_email(admin: Administration, email: str) -> str | None:
    """Return the id of the user with this address, or None.

    Raises `InvalidRequest` if several users have the address, which earlier versions permitted.
    """
    found = await _users_with_email(admin, email)
    if len(found) > 1:
        raise InvalidRequest(
            f"'user_email': several users have the address '{email[:64]}'; send the 'user_id' instead.",
            param="user_email",
        )
    return found[0] if found else None


async def _users_with_email(admin: Administration, email: str) -> list[str]:
    users = await admin.store.directory(EntryKind.USER)
    return [user.id for user in users if user.email and is_same_email(user.email, email)]


async def claim_email(admin: Administration, email: str, id: str) -> str:
    """Claim an address for the new user `id`, and return the id of the address's owner.

    Concurrent requests with the same address get the same id.
    """
    name = _claim_name(email)
    owner = await admin.claim(name, "", id)
    user = None if owner == id else await admin.entry(EntryKind.USER, owner)
    if user is not None and not is_same_email(user.email, email):  # the owner has a different address now
        await admin.unclaim(name, owner)
        owner = await admin.claim(name, "", id)
    return owner


async def reserve_email(admin: Administration, email: str, id: str) -> None:
    """Claim an address for the user `id`. Raises `AlreadyExists` if a different user has it."""
    owner = await claim_email(admin, email, id)
    if owner != id or any(user != id for user in await _users_with_email(admin, email)):
        await release_email(admin, email, id)
        raise AlreadyExists(
            f"'user_email': a user with the address '{email[:64]}' already exists; choose another address, or update "
            "that user.",
            param="user_email",
        )


async def change_email(admin: Administration, user: DirectoryEntry, email: str) -> bool:
    """Claim a new email address for a user.

    Returns True if the address was claimed, and False if it is empty or the user has it already. Raises `AlreadyExists`
    if a different user has the address.
    """
    if not email or is_same_email(email, user.email):
        return False
    await reserve_email(admin, email, user.id)
    return True


async def release_email(admin: Administration, email: str, id: str) -> None:
    """Make an address of the user `id` available to other users."""
    await admin.unclaim(_claim_name(email), id)


def _claim_name(email: str) -> str:
    # Claims of earlier versions, named `email ADDRESS`, have no effect: some of them belong to deleted users.
    return f"user_email {_normal(email)}"
