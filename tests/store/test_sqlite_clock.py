"""Tests of the SQLite store after the clock was set back, while it runs and between two processes."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.contract.state import response
from unisono.core.quotas import Account, KeyLimits, LedgerLine, QuotaKind, QuotaReservation, TokenUsage, UsageRecord
from unisono.core.state_store import BackgroundRun, Status
from unisono.store.sqlite import SqliteStore

RIGHT = 1_700_000_000.0
ACCOUNT = Account("ann", "key")
NUMBERS = itertools.count()


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def opened(path: Path | None, clock: Clock) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, clock=clock)
    await store.start()
    try:
        yield store
    finally:
        await store.aclose()


def claim(tokens: int = 1, **limits: int) -> QuotaReservation:
    once = f"once {next(NUMBERS)}"
    return QuotaReservation(
        ACCOUNT, once, KeyLimits(**limits), input=tokens, expected_output=0, max_output=1, for_s=10.0
    )


@pytest.mark.parametrize("ahead_s", [30.5, 180.0, 3600.0, 400 * 86_400.0])
async def test_state_of_a_killed_process_lapses_although_its_clock_was_ahead(tmp_path: Path, ahead_s: float) -> None:
    path, clock, run = tmp_path / "state.db", Clock(RIGHT + ahead_s), BackgroundRun("ann", "resp_1")
    async with opened(path, clock) as store:
        assert await store.acquire("ann", "resp_1", "old:resp_1", 10.0, reserve_s=10.0)
        await store.watch(run, 10.0)
        assert (await store.reserve(claim(max_parallel=1))).refused is None
    clock.now = RIGHT + 3.0
    async with opened(path, clock) as store:
        # They live as long as without the correction.
        assert await store.acquire("ann", "resp_1", "new:resp_2", 10.0) is None
        assert (await store.reserve(claim(max_parallel=1))).refused is QuotaKind.PARALLEL
        assert await store.lapsed() == ()
        clock.now += 21.0
        assert await store.lapsed() == (run,)
        assert await store.acquire("ann", "resp_1", "new:resp_2", 10.0)
        assert (await store.reserve(claim(max_parallel=1))).refused is None


@pytest.mark.parametrize("ahead_s", [30.0, 120.0, 3600.0])
@pytest.mark.parametrize("limits", [{"rpm": 2}, {"tpm": 2}], ids=["requests", "tokens"])
async def test_usage_counts_for_a_minute_after_the_clock_was_set_back(ahead_s: float, limits: dict[str, int]) -> None:
    clock = Clock(RIGHT + ahead_s)
    async with opened(None, clock) as store:
        for _ in range(2):
            assert (await store.reserve(claim(**limits))).refused is None
            clock.now += 1.0
        clock.now = RIGHT + 3.0
        status = await store.reserve(claim(**limits))
        assert status.refused is not None
        assert status.retry_after_s is not None
        assert 55.0 < status.retry_after_s <= 61.0
        clock.now += status.retry_after_s
        assert (await store.reserve(claim(**limits))).refused is None


async def test_a_settlement_after_a_setback_corrects_the_usage_of_its_own_minute() -> None:
    clock, limits = Clock(RIGHT + 3600.0), {"tpm": 100}
    async with opened(None, clock) as store:
        large = claim(100, **limits)
        await store.reserve(large)
        clock.now = RIGHT
        used = LedgerLine(ACCOUNT, "m", "2026-11-21", TokenUsage(requests=1, input=60))
        await store.settle(UsageRecord("turn", used, large))
        assert (await store.reserve(claim(40, **limits))).refused is None
        assert (await store.reserve(claim(1, **limits))).refused is QuotaKind.TOKENS
        # The usage of the wrong time does not count again when this time comes.
        clock.now = RIGHT + 3600.0
        assert (await store.reserve(claim(100, **limits))).refused is None


async def test_a_lease_that_is_held_survives_a_setback() -> None:
    clock = Clock(RIGHT + 3600.0)
    async with opened(None, clock) as store:
        lease = await store.acquire("ann", "resp_1", "old:resp_1", 10.0)
        assert lease is not None
        clock.now = RIGHT
        assert await store.acquire("ann", "resp_1", "new:resp_2", 10.0) is None
        assert await store.renew(lease, 10.0)
        clock.now += 9.0
        assert await store.acquire("ann", "resp_1", "new:resp_2", 10.0) is None


async def test_a_setback_does_not_shorten_the_retention() -> None:
    clock = Clock(RIGHT)
    async with opened(None, clock) as store:
        stored = response(status=Status.COMPLETED)
        await store.create("ann", stored)
        clock.now = RIGHT + 20 * 86_400.0
        await store.check()
        for clock.now in (RIGHT, RIGHT + 29 * 86_400.0):
            await store.check()
            assert await store.responses("ann", [stored.id]) == (stored,)
