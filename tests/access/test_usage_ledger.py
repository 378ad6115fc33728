"""Tests of the usage ledger: per-minute limits, and writes to a store that may be down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.access.usage_ledger import UsageLedger
from unisono.core.quotas import (
    Account,
    AccountStore,
    KeyLimits,
    LedgerLine,
    QuotaKind,
    QuotaReservation,
    QuotaStatus,
    TokenUsage,
    UsageRecord,
)
from unisono.errors import StoreUnavailable
from unisono.store.sqlite import SqliteStore

ACCOUNT = Account("team", "key_1")
NUMBERS = count()


def claim(limits: KeyLimits, **changes: Any) -> QuotaReservation:
    reservation = QuotaReservation(
        ACCOUNT, f"once {next(NUMBERS)}", limits, input=60, expected_output=40, max_output=1000, for_s=1000.0
    )
    return replace(reservation, **changes)


def settlement(reservation: QuotaReservation, **used: int) -> UsageRecord:
    return UsageRecord(
        f"turn {next(NUMBERS)}",
        LedgerLine(ACCOUNT, "gpt-oss", "2026-11-21", TokenUsage(requests=1, **used)),
        reservation,
    )


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def open_store(clock: Clock) -> AsyncIterator[SqliteStore]:
    opened = SqliteStore(None, clock=clock)
    await opened.start()
    try:
        yield opened
    finally:
        await opened.aclose()


# Per-minute limits

EDGES: dict[str, tuple[KeyLimits, float, Sequence[tuple[float, bool]]]] = {
    "requests at the beginning of a second": (KeyLimits(rpm=1), 0.0, [(59.9, False), (60.9, False), (61.0, True)]),
    "requests at the end of a second": (KeyLimits(rpm=1), 0.999, [(59.0, False), (60.0, False), (60.001, True)]),
    "tokens at the beginning of a second": (KeyLimits(tpm=100), 0.0, [(59.9, False), (60.9, False), (61.0, True)]),
    "tokens at the end of a second": (KeyLimits(tpm=199), 0.999, [(59.0, False), (60.0, False), (60.001, True)]),
}


@pytest.mark.parametrize(("limits", "at", "attempts"), EDGES.values(), ids=EDGES)
async def test_quota_is_free_again_exactly_after_the_minute(
    limits: KeyLimits, at: float, attempts: Sequence[tuple[float, bool]]
) -> None:
    clock = Clock()
    async with open_store(clock) as accounts:
        clock.now += at
        started = clock.now
        assert (await accounts.reserve(claim(limits))).refused is None
        for delay_s, granted in attempts:
            clock.now = started + delay_s
            status = await accounts.reserve(claim(limits))
            assert (status.refused is None) == granted, delay_s
            if not granted:
                # A request is accepted after `retry_after_s`, and not earlier.
                assert status.retry_after_s == pytest.approx(started - at + 61 - clock.now)


@given(st.lists(st.sampled_from([0.0, 0.001, 0.5, 0.999, 7.0, 19.99, 30.0, 59.999, 60.0, 61.0]), max_size=30))
def test_no_sixty_seconds_exceed_the_request_limit(pauses: list[float]) -> None:
    async def granted() -> list[float]:
        clock, times = Clock(), []
        async with open_store(clock) as accounts:
            for pause in pauses:
                clock.now += pause
                if (await accounts.reserve(claim(KeyLimits(rpm=3)))).refused is None:
                    times.append(clock.now)
        return times

    times = asyncio.run(granted())
    assert all(last - first >= 60 for first, last in zip(times, times[3:], strict=False))


async def test_minute_counts_settled_instead_of_reserved_tokens() -> None:
    clock, limits = Clock(), KeyLimits(tpm=200)
    async with open_store(clock) as accounts:
        reservation = claim(limits)
        await accounts.reserve(reservation)
        await accounts.settle(settlement(reservation, input=60, output=140))
        assert (await accounts.reserve(claim(limits, input=1, expected_output=1))).refused is QuotaKind.TOKENS
        clock.now += 61
        assert (await accounts.reserve(claim(limits))).refused is None


# Writes to the store


class FailingAccounts(AccountStore):
    """Quota store that can fail; `calls` lists the operations that were tried."""

    def __init__(self, accounts: AccountStore) -> None:
        self._accounts = accounts
        self.down = False
        # The next reservation succeeds but reports a failure.
        self.is_late = False
        self.calls: list[str] = []

    def _try(self, operation: str) -> None:
        self.calls.append(operation)
        if self.down:
            raise StoreUnavailable("down")

    async def reserve(self, claim: QuotaReservation) -> QuotaStatus:
        self._try("reserve")
        status = await self._accounts.reserve(claim)
        if self.is_late:
            self.is_late = False
            raise StoreUnavailable("late")
        return status

    async def extend(self, *claims: QuotaReservation) -> None:
        self._try("extend")
        await self._accounts.extend(*claims)

    async def settle(self, *settlements: UsageRecord) -> None:
        self._try("settle")
        await self._accounts.settle(*settlements)

    async def ledger(self, since: str, until: str, account: Account | None = None) -> tuple[LedgerLine, ...]:
        return await self._accounts.ledger(since, until, account)

    async def requests(self) -> int:
        return sum(entry.used.requests for entry in await self.ledger("0000", "9999"))


@asynccontextmanager
async def failing_ledger(held_s: float = 1000.0) -> AsyncIterator[tuple[FailingAccounts, UsageLedger]]:
    async with open_store(Clock()) as opened:
        accounts = FailingAccounts(opened)
        ledger = UsageLedger(accounts, held_s=held_s)
        try:
            yield accounts, ledger
        finally:
            accounts.down = False
            await ledger.aclose()


ONE_PARALLEL = KeyLimits(max_parallel=1)


async def test_released_claim_frees_its_slot_without_a_ledger_entry() -> None:
    async with failing_ledger() as (accounts, ledger):
        reservation = claim(ONE_PARALLEL)
        assert (await ledger.reserve(reservation)).limits == ONE_PARALLEL
        assert (await ledger.reserve(claim(ONE_PARALLEL))).refused is QuotaKind.PARALLEL
        ledger.release(reservation)
        async with asyncio.timeout(5):
            while (await ledger.reserve(claim(ONE_PARALLEL))).refused is not None:
                await asyncio.sleep(0.001)
        assert await accounts.requests() == 0


async def test_failed_settlements_are_retried_until_they_are_written() -> None:
    async with failing_ledger() as (accounts, ledger):
        claims = [claim(KeyLimits(max_parallel=9)) for _ in range(3)]
        for reservation in claims:
            await ledger.reserve(reservation)
        accounts.down = True
        for reservation in claims:
            await ledger.settle(settlement(reservation))
        assert await accounts.requests() == 0
        accounts.down = False
        async with asyncio.timeout(10):
            while await accounts.requests() < 3:
                await asyncio.sleep(0.01)


async def test_concurrent_settlements_are_written_together() -> None:
    async with failing_ledger() as (accounts, ledger):
        claims = [claim(KeyLimits(max_parallel=99)) for _ in range(50)]
        for reservation in claims:
            await ledger.reserve(reservation)
        await asyncio.gather(*(ledger.settle(settlement(reservation)) for reservation in claims))
        assert await accounts.requests() == 50
        assert accounts.calls.count("settle") == 1


async def test_only_the_rejected_record_is_dropped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with failing_ledger() as (accounts, ledger):
        claims = [claim(KeyLimits(max_parallel=99)) for _ in range(5)]
        for reservation in claims:
            await ledger.reserve(reservation)
        records = [
            settlement(reservation, input=2**63 if number == 2 else 1) for number, reservation in enumerate(claims)
        ]
        await asyncio.gather(*(ledger.settle(reservation) for reservation in records))
        assert await accounts.requests() == 4
        await ledger.settle(settlement(claim(KeyLimits())))
        assert await accounts.requests() == 5
    assert [record.message for record in caplog.records] == ["usage record lost: the store rejects it"]


async def test_reservation_with_an_unknown_result_is_released() -> None:
    async with failing_ledger() as (accounts, ledger):
        accounts.down = True
        with pytest.raises(StoreUnavailable):
            await ledger.reserve(claim(ONE_PARALLEL))
        accounts.down = False
        async with asyncio.timeout(10):
            while "settle" not in accounts.calls:
                await asyncio.sleep(0.01)
        assert (await ledger.reserve(claim(ONE_PARALLEL))).refused is None


async def test_insisting_reservation_is_retried_once_and_reserved_once() -> None:
    async with failing_ledger() as (accounts, ledger):
        accounts.is_late = True
        reservation = claim(KeyLimits(max_parallel=2))
        assert (await ledger.reserve(reservation, insist=True)).refused is None
        assert accounts.calls == ["reserve", "reserve"]
        assert (await ledger.reserve(replace(reservation, once="another"))).refused is None
        assert (await ledger.reserve(replace(reservation, once="a third"))).refused is not None
        accounts.is_late = True
        with pytest.raises(StoreUnavailable):
            await ledger.reserve(replace(reservation, once="a fourth"))


async def test_claims_are_extended_until_they_are_settled() -> None:
    async with failing_ledger(held_s=0.03) as (accounts, ledger):
        reservation = claim(ONE_PARALLEL)
        await ledger.reserve(reservation)
        async with asyncio.timeout(5):
            while accounts.calls.count("extend") < 2:
                await asyncio.sleep(0.001)
        await ledger.settle(settlement(reservation))
        await asyncio.sleep(0.03)
        count_before = accounts.calls.count("extend")
        await asyncio.sleep(0.05)
        assert accounts.calls.count("extend") == count_before
