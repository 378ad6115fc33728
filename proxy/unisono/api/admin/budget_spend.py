"""Spend from the ledger: totals of keys, teams and users, and spend carried to new budgets.

If a change adds a budget or gives it a different period, the earlier usage of that period counts against the budget.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from typing import Final, TypeAlias

from unisono.api.admin.administration import Administration
from unisono.api.admin.fields import iso
from unisono.api.admin.limit_fields import limit_answer
from unisono.core.access import KeyRecord, shared_account, with_budget
from unisono.core.conversation import Json
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.core.quotas import MILLION, SHARED_TENANT, Account, KeyLimits, LedgerLine, TokenUsage

# Texts before and after all days of the ledger.
FIRST_DAY: Final = "0000-00-00"
LAST_DAY: Final = "9999-99-99"


async def ledger_lines(admin: Administration, since: str = FIRST_DAY, until: str = LAST_DAY) -> tuple[LedgerLine, ...]:
    """Return the usage of all keys and of the master key."""
    lines = await admin.store.ledger(since, until)
    # The usage of accounts that keys share, such as teams, is already included in the usage of the keys.
    return tuple(line for line in lines if line.account.tenant != SHARED_TENANT)


async def key_owners(admin: Administration) -> Mapping[str, str]:
    """Return the users of all keys, including revoked keys, by the id of the key."""
    return {key.id: key.user for key in await admin.store.keys() if key.user}


async def spend_by(admin: Administration, name: Callable[[LedgerLine], str]) -> dict[str, float]:
    """Return the total cost in USD of all lines with the same `name(line)`."""
    sums: dict[str, int] = {}
    for line in await ledger_lines(admin):
        sums[name(line)] = sums.get(name(line), 0) + line.used.cost
    return {each: cost / MILLION for each, cost in sums.items()}


async def key_spend(admin: Administration, record: KeyRecord) -> dict[str, Json]:
    """Return the fields `spend` and `litellm_budget_table` of a key.

    `spend` is the cost in USD since the day on which the budget period of the key began. `litellm_budget_table`
    contains the limits that apply; None for a key without a named budget.
    """
    limits, table = await applied_limits(admin, record)
    spend = await account_spend(admin, Account(record.tenant, record.id), limits)
    return {"spend": spend, "litellm_budget_table": table if record.budget else None}


async def applied_limits(
    admin: Administration, limited: KeyRecord | DirectoryEntry
) -> tuple[KeyLimits, dict[str, Json] | None]:
    """Return the limits of a key or an entry, completed by its named budget.

    The second result contains the same limits in LiteLLM's format; None if nothing is limited.
    """
    budget = await admin.entry(EntryKind.BUDGET, limited.budget) if limited.budget else None
    limits = with_budget(limited.limits, limited.budget, budget)
    if not limits.limited:
        return limits, None
    created_at = iso((budget or limited).created_at)
    answer = limit_answer(limits, admin.clock(), admin.zone)
    return limits, {"budget_id": limited.budget or None, **answer, "created_at": created_at}


async def account_spend(admin: Administration, account: Account, limits: KeyLimits) -> float:
    """Return the cost of an account in USD, since the day on which its budget period began."""
    start = limits.budget_period.window(admin.clock(), limits.budget_since, admin.zone)[0]
    lines = await admin.store.ledger(first_day(start), LAST_DAY, account)
    return sum((line.used for line in lines), TokenUsage()).cost / MILLION


def first_day(start: float) -> str:
    """Return the day on which a budget period began, as in the ledger; `start` is its Unix time."""
    return datetime.fromtimestamp(start, UTC).date().isoformat() if start else FIRST_DAY


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
