"""Charges for the tokens of background responses that no process can continue."""

from __future__ import annotations

from typing import cast

from tests.e2e.keyed import ring
from unisono.access.prices import PriceList
from unisono.access.usage_ledger import UsageLedger
from unisono.core.access import Caller, SharedLimits, shared_account
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.core.quotas import Account, KeyLimits, QuotaKind, QuotaReservation
from unisono.engine.request import GenerationService
from unisono.middleware.quota import Metering

LIMITS = KeyLimits(token_budget=20)


async def test_a_lost_journal_is_charged_to_the_budgets_of_key_team_and_user() -> None:
    shared = [shared_account(DirectoryEntry(kind, "a", 0.0)) for kind in (EntryKind.TEAM, EntryKind.USER)]
    caller = Caller("a", "key_a", LIMITS, shared_limits=tuple(SharedLimits(account, LIMITS) for account in shared))
    accounts = [Account("a", "key_a"), *shared]
    async with ring("memory://") as keys:
        ledger = UsageLedger(keys.store, held_s=30.0)
        metering = Metering(cast("GenerationService", None), ledger, PriceList(), lambda _: frozenset())
        # Another process that fails on the same response charges nothing more.
        for _ in range(2):
            metering.charge_journal(caller, "gone", "resp_a", tuple(range(20)))
        await ledger.aclose()
        used = {line.account: line.used for line in await keys.store.ledger("0000", "9999")}
        assert {account: (used[account].requests, used[account].output) for account in accounts} == dict.fromkeys(
            accounts, (1, 20)
        )
        for account in accounts:
            status = await keys.store.reserve(
                QuotaReservation(account, "probe", LIMITS, 0, 1, 1, 30.0, period="none:0")
            )
            assert status.refused is QuotaKind.TOKEN_BUDGET
