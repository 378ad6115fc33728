"""Tests of limits in one process: equal to those of a store, with limited memory."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.access.test_usage_ledger import Clock, claim, failing_ledger, open_store, settlement
from unisono.access.outage_limits import MAX_ACCOUNTS, OutageLimits
from unisono.core.quotas import Account, KeyLimits, QuotaKind, QuotaReservation, QuotaStatus
from unisono.errors import StoreUnavailable

PAUSES_S = st.sampled_from([0.0, 0.5, 0.999, 7.0, 30.0, 60.0, 61.0])
STEPS = st.lists(st.tuples(PAUSES_S, st.sampled_from(["reserve", "settle", "owed"]), st.integers(0, 300)), max_size=30)
LIMITS = st.sampled_from(
    [
        KeyLimits(rpm=3),
        KeyLimits(rpm=0),
        KeyLimits(tpm=250),
        KeyLimits(tpm=50),
        KeyLimits(max_parallel=2),
        KeyLimits(2, 250, 1),
    ]
)


@settings(max_examples=50)
@given(LIMITS, STEPS)
def test_outage_limits_match_those_of_a_store(limits: KeyLimits, steps: list[tuple[float, str, int]]) -> None:
    async def compare() -> list[tuple[QuotaStatus, QuotaStatus]]:
        clock, running, statuses = Clock(), list[QuotaReservation](), list[tuple[QuotaStatus, QuotaStatus]]()
        local = OutageLimits(clock)
        async with open_store(clock) as accounts:
            for pause, step, tokens in steps:
                clock.now += pause
                if step == "settle":
                    if running:
                        reservation = running.pop(0)
                        await accounts.settle(settlement(reservation, output=tokens))
                        local.settle(reservation, tokens)
                    continue
                reservation = claim(limits, for_s=1e6, is_owed=step == "owed")
                statuses.append((await accounts.reserve(reservation), local.reserve(reservation)))
                if statuses[-1][0].refused is None:
                    running.append(reservation)
        return statuses

    for stored, counted in asyncio.run(compare()):
        assert stored == counted


@pytest.mark.parametrize(
    ("limits", "refused"),
    [
        (KeyLimits(rpm=2), QuotaKind.REQUESTS),
        (KeyLimits(tpm=200), QuotaKind.TOKENS),
        (KeyLimits(max_parallel=2), QuotaKind.PARALLEL),
    ],
)
async def test_claims_granted_by_the_store_count_after_it_fails(limits: KeyLimits, refused: QuotaKind) -> None:
    async with failing_ledger() as (accounts, ledger):
        await ledger.reserve(claim(limits))
        accounts.down = True
        second, third = claim(limits), claim(limits)
        with pytest.raises(StoreUnavailable):
            await ledger.reserve(second)
        granted = ledger.reserve_locally(second)
        assert (granted.refused, granted.limits) == (None, limits)
        assert ledger.reserve_locally(third).refused is refused
        await ledger.settle(settlement(second))
        # The request still counts in its minute; its tokens and its parallel slot are free again.
        is_free = ledger.reserve_locally(third).refused is None
        assert is_free == (refused is not QuotaKind.REQUESTS)


def test_number_of_accounts_is_limited() -> None:
    local = OutageLimits(Clock())
    first = claim(KeyLimits(rpm=1))
    assert local.reserve(first).refused is None
    for number in range(MAX_ACCOUNTS):
        local.reserve(claim(KeyLimits(rpm=1), account=Account("team", f"other {number}")))
    assert local.reserve(claim(KeyLimits(rpm=1))).refused is None
    local.settle(first, 0)
