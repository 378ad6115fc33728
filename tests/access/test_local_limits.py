"""Limits of one process: the same as those of a store, and bounded in memory."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.access.test_usage_ledger import Clock, claim, ended, keeping, store
from unisono.access.local_limits import MAX_ACCOUNTS, LocalLimits
from unisono.core.access import KeyLimits
from unisono.core.quotas import Account, QuotaKind, QuotaReservation, QuotaStatus
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
def test_a_process_refuses_as_a_store_does(limits: KeyLimits, steps: list[tuple[float, str, int]]) -> None:
    async def compared() -> list[tuple[QuotaStatus, QuotaStatus]]:
        clock, running, standings = Clock(), list[QuotaReservation](), list[tuple[QuotaStatus, QuotaStatus]]()
        local = LocalLimits(clock)
        async with store(clock) as accounts:
            for pause, step, tokens in steps:
                clock.now += pause
                if step == "settle":
                    if running:
                        one = running.pop(0)
                        await accounts.settle(ended(one, output=tokens))
                        local.settle(one, tokens)
                    continue
                one = claim(limits, for_s=1e6, is_owed=step == "owed")
                standings.append((await accounts.reserve(one), local.reserve(one)))
                if standings[-1][0].refused is None:
                    running.append(one)
        return standings

    for stored, counted in asyncio.run(compared()):
        assert stored == counted


@pytest.mark.parametrize(
    ("limits", "refused"),
    [
        (KeyLimits(rpm=2), QuotaKind.REQUESTS),
        (KeyLimits(tpm=200), QuotaKind.TOKENS),
        (KeyLimits(max_parallel=2), QuotaKind.PARALLEL),
    ],
)
async def test_what_the_store_granted_counts_when_it_fails(limits: KeyLimits, refused: QuotaKind) -> None:
    async with keeping() as (accounts, books):
        await books.reserve(claim(limits))
        accounts.down = True
        second, third = claim(limits), claim(limits)
        with pytest.raises(StoreUnavailable):
            await books.reserve(second)
        granted = books.reserve_locally(second)
        assert (granted.refused, granted.limits) == (None, limits)
        assert books.reserve_locally(third).refused is refused
        await books.settle(ended(second))
        # A request stays in its minute; its tokens and its place are free again.
        is_free = books.reserve_locally(third).refused is None
        assert is_free == (refused is not QuotaKind.REQUESTS)


def test_only_so_many_accounts_are_counted() -> None:
    local = LocalLimits(Clock())
    first = claim(KeyLimits(rpm=1))
    assert local.reserve(first).refused is None
    for number in range(MAX_ACCOUNTS):
        local.reserve(claim(KeyLimits(rpm=1), account=Account("team", f"other {number}")))
    assert local.reserve(claim(KeyLimits(rpm=1))).refused is None
    local.settle(first, 0)
