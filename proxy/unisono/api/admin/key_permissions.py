"""Changes of keys that only an admin may make.

A caller who is not an admin can make a key stricter, but cannot loosen it. An admin may have set the limits of the key
on purpose, and the gateway does not store who has set a limit. Checks compare the key before and after a change instead
of the fields of the request, because different values of a field can have the same effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from unisono.api.admin.limit_fields import LIMIT_NAMES
from unisono.api.admin.roles import Actor
from unisono.core.access import KeyRecord, with_budget
from unisono.core.directory import DirectoryEntry
from unisono.core.frozen import dataclass
from unisono.core.quotas import KeyLimits
from unisono.errors import NotAllowed


@dataclass(frozen=True, slots=True)
class KeyRights:
    """Key, and the limits that apply to it: its own limits and those of its named budget."""

    key: KeyRecord
    limits: KeyLimits

    @property
    def has_period(self) -> bool:
        return self.limits.has_budget or self.limits.soft_budget is not None


Change = Callable[[KeyRights, KeyRights], bool]

# Changes that only an admin of the gateway may make. Each row contains the field and the description of the change
# for the error, and a function that recognises the change.
ADMIN_CHANGES: Final[tuple[tuple[str, str, Change], ...]] = (
    ("user_id", "take a key from its user", lambda was, now: bool(was.key.user) and now.key.user != was.key.user),
    ("budget_id", "change the budget of a key", lambda was, now: now.key.budget != was.key.budget),
    ("raw", "permit raw completions", lambda was, now: now.key.raw and not was.key.raw),
)


def _exceeds(now: float | None, was: float | None) -> bool:
    """Return True if a limit was raised or removed; None means no limit."""
    return was is not None and (now is None or now > was)


def _adds(now: frozenset[str] | None, was: frozenset[str] | None) -> bool:
    """Return True if names were added to a set of permitted names; None permits all names."""
    return was is not None and (now is None or not now <= was)


def _raises(name: str) -> Change:
    return lambda was, now: _exceeds(getattr(now.limits, name), getattr(was.limits, name))


def _renews(was: KeyRights, now: KeyRights) -> bool:
    """Return True if the period of a budget was changed, so that it renews at a different time."""
    periods = [(each.limits.budget_period, each.limits.budget_since) for each in (was, now)]
    return was.has_period and periods[0] != periods[1]


# Changes that an admin of the key's team may make too; rows as in `ADMIN_CHANGES`.
LOOSER: Final[tuple[tuple[str, str, Change], ...]] = (
    ("blocked", "unblock a key", lambda was, now: was.key.is_blocked and not now.key.is_blocked),
    ("duration", "extend the life of a key", lambda was, now: _exceeds(now.key.expires_at, was.key.expires_at)),
    ("models", "add models to a key", lambda was, now: _adds(now.key.models, was.key.models)),
    (
        "object_permission",
        "add tool servers to a key",
        lambda was, now: _adds(now.key.mcp_servers, was.key.mcp_servers),
    ),
    *(
        (name, "raise or remove this limit", _raises(own))
        for name, own in {**LIMIT_NAMES, "max_budget": "money_budget", "soft_budget": "soft_budget"}.items()
    ),
    ("budget_duration", "change the budget period of a key", _renews),
)


def check_change(actor: Actor, before: KeyRecord, after: KeyRecord, budget: DirectoryEntry | None) -> None:
    """Raise `NotAllowed` for a change of a key that only an admin may make.

    `budget` is the named budget of the key before the change; None if there was none.
    """
    if actor.changes_all:
        return
    was, now = (KeyRights(key, with_budget(key.limits, before.budget, budget)) for key in (before, after))
    checks = ADMIN_CHANGES if before.tenant in actor.teams else (*ADMIN_CHANGES, *LOOSER)
    for field, action, is_made in checks:
        if is_made(was, now):
            raise NotAllowed(f"'{field}': only an admin may {action}.", param=field)


def check_new_key(actor: Actor, *, is_raw: bool) -> None:
    """Raise `NotAllowed` for settings of a new key that only an admin may choose."""
    if is_raw and not actor.changes_all:
        raise NotAllowed("'raw': only an admin may permit raw completions.", param="raw")
