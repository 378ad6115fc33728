"""Settings of keys that only an admin may change."""

from __future__ import annotations

from unisono.api.admin.key_schema import KeySettings, UpdateKey
from unisono.api.admin.roles import Actor
from unisono.core.access import KeyRecord
from unisono.errors import NotAllowed


def check_permissions(actor: Actor, body: KeySettings, record: KeyRecord | None = None) -> None:
    """Raise `NotAllowed` for settings that only an admin may change.

    `record` is the key before the change; None for a new key.
    """
    if actor.changes_all:
        return
    is_released = isinstance(body, UpdateKey) and "user_id" in body.model_fields_set and not body.user_id
    if record is not None and record.user and is_released:
        raise NotAllowed("'user_id': only an admin may take a key from its user.", param="user_id")
    if record is not None and record.budget and "budget_id" in body.model_fields_set and not body.budget_id:
        raise NotAllowed("'budget_id': only an admin may detach a key from its budget.", param="budget_id")
    if body.raw:
        raise NotAllowed("'raw': only an admin may permit raw completions.", param="raw")
    is_team_admin = record is not None and record.tenant in actor.teams
    # `null` unblocks a key too.
    is_unblocked = "blocked" in body.model_fields_set and not body.blocked
    if record is not None and record.is_blocked and is_unblocked and not is_team_admin:
        raise NotAllowed("'blocked': only an admin may unblock a key.", param="blocked")
