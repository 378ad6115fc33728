"""Spend of keys, teams and users, summed from the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from unisono.api.admin.administration import Administration
from unisono.core.access import KeyRecord
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


async def key_spend(admin: Administration, record: KeyRecord) -> float:
    """Return the cost of a key in USD, since the day on which its budget period began."""
    return await account_spend(admin, Account(record.tenant, record.id), record.limits)


async def account_spend(admin: Administration, account: Account, limits: KeyLimits) -> float:
    """Return the cost of an account in USD, since the day on which its budget period began."""
    start = limits.budget_period.window(admin.clock(), limits.budget_since, admin.zone)[0]
    since = datetime.fromtimestamp(start, UTC).date().isoformat() if start else FIRST_DAY
    lines = await admin.store.ledger(since, LAST_DAY, account)
    return sum((line.used for line in lines), TokenUsage()).cost / MILLION
