"""Earlier usage that counts against a new budget, or against a budget whose period changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeAlias

from unisono.api.admin.administration import Administration
from unisono.api.admin.ledger_totals import LAST_DAY, applied_limits, first_day, ledger_lines
from unisono.core.access import KeyRecord, shared_account, with_budget
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.core.quotas import Account, KeyLimits, TokenUsage

Owner: TypeAlias = KeyRecord | DirectoryEntry


async def carry_spend(admin: Administration, was: Owner, now: Owner) -> None:
    """Count earlier usage against each budget that a change adds or gives a different period.

    `was` and `now` are the key or directory entry before and after the change. The store may not have summed the usage
    of the budget's current period. The sum is therefore taken from the ledger, from the day on which the period began.
    Call this function before the change is stored, so that no request finds the new budget unspent.
    """
    async for owner, before, after in _changed_limits(admin, was, now):
        start, ends = after.budget_period.window(admin.clock(), after.budget_since, admin.zone)
        period = after.budget_period.name(start)
        before_start, _ = before.budget_period.window(admin.clock(), before.budget_since, admin.zone)
        if not after.has_any_budget or (before.has_any_budget and before.budget_period.name(before_start) == period):
            continue
        if (used := await _usage_since(admin, owner, first_day(start))).tokens or used.cost:
            await admin.store.raise_spent(_account_of(owner), period, ends, used)


async def _changed_limits(
    admin: Administration, was: Owner, now: Owner
) -> AsyncIterator[tuple[Owner, KeyLimits, KeyLimits]]:
    """Yield each owner whose limits may change, with the limits before and after the change."""
    if isinstance(was, KeyRecord) or was.kind is not EntryKind.BUDGET:
        yield now, (await applied_limits(admin, was))[0], (await applied_limits(admin, now))[0]
        return
    assert isinstance(now, DirectoryEntry)
    if was.limits == now.limits:
        return
    owners: list[Owner] = [key for key in await admin.store.keys() if key.revoked_at is None]
    for kind in (EntryKind.TEAM, EntryKind.USER, EntryKind.CUSTOMER):
        owners += await admin.store.directory(kind)
    for owner in owners:
        if owner.budget == now.id:
            yield owner, with_budget(owner.limits, now.id, was), with_budget(owner.limits, now.id, now)


def _account_of(owner: Owner) -> Account:
    return Account(owner.tenant, owner.id) if isinstance(owner, KeyRecord) else shared_account(owner)


async def _usage_since(admin: Administration, owner: Owner, since: str) -> TokenUsage:
    """Return the usage of an owner since a day; for a team or a user, the usage of its keys."""
    if isinstance(owner, KeyRecord) or owner.kind is EntryKind.CUSTOMER:
        lines = await admin.store.ledger(since, LAST_DAY, _account_of(owner))
    else:
        # A key that was revoked before the owner was created belonged to a deleted team or user with the same id.
        keys = {
            key.id
            for key in await admin.store.keys()
            if owner.id == (key.tenant if owner.kind is EntryKind.TEAM else key.user)
            and (key.revoked_at is None or key.revoked_at > owner.created_at)
        }
        lines = tuple(line for line in await ledger_lines(admin, since) if line.account.key in keys)
    return sum((line.used for line in lines), TokenUsage())
