"""What limits a key holds to the second, and how reservations and settlements of a process find their way to a store
that may be down."""

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
from unisono.core.access import KeyLimits
from unisono.core.quotas import (
    Account,
    AccountStore,
    LedgerLine,
    QuotaKind,
    QuotaReservation,
    QuotaStatus,
    TokenUsage,
    UsageRecord,
)
from unisono.errors import StoreUnavailable
from unisono.store.sqlite import SqliteStore

WHOSE = Account("team", "key_1")
NUMBERS = count()


def claim(limits: KeyLimits, **changes: Any) -> QuotaReservation:
    made = QuotaReservation(
        WHOSE, f"once {next(NUMBERS)}", limits, input=60, expected_output=40, max_output=1000, for_s=1000.0
    )
    return replace(made, **changes)


def ended(of: QuotaReservation, **used: int) -> UsageRecord:
    return UsageRecord(
        f"turn {next(NUMBERS)}", LedgerLine(WHOSE, "gpt-oss", "2026-11-21", TokenUsage(requests=1, **used)), of
    )


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def store(clock: Clock) -> AsyncIterator[SqliteStore]:
    opened = SqliteStore(None, clock=clock)
    await opened.start()
    try:
        yield opened
    finally:
        await opened.aclose()


# The minute

EDGES: dict[str, tuple[KeyLimits, float, Sequence[tuple[float, bool]]]] = {
    "requests at the beginning of a second": (KeyLimits(rpm=1), 0.0, [(59.9, False), (60.9, False), (61.0, True)]),
    "requests at the end of a second": (KeyLimits(rpm=1), 0.999, [(59.0, False), (60.0, False), (60.001, True)]),
    "tokens at the beginning of a second": (KeyLimits(tpm=100), 0.0, [(59.9, False), (60.9, False), (61.0, True)]),
    "tokens at the end of a second": (KeyLimits(tpm=199), 0.999, [(59.0, False), (60.0, False), (60.001, True)]),
}


@pytest.mark.parametrize(("limits", "at", "tries"), EDGES.values(), ids=EDGES)
async def test_a_minute_ends_at_its_edge_and_never_before(
    limits: KeyLimits, at: float, tries: Sequence[tuple[float, bool]]
) -> None:
    clock = Clock()
    async with store(clock) as accounts:
        clock.now += at
        began = clock.now
        assert (await accounts.reserve(claim(limits))).refused is None
        for later, granted in tries:
            clock.now = began + later
            standing = await accounts.reserve(claim(limits))
            assert (standing.refused is None) == granted, later
            if not granted:
                # Who comes back when they are told to is let in, and nobody a moment earlier.
                assert standing.retry_after_s == pytest.approx(began - at + 61 - clock.now)


@given(st.lists(st.sampled_from([0.0, 0.001, 0.5, 0.999, 7.0, 19.99, 30.0, 59.999, 60.0, 61.0]), max_size=30))
def test_no_sixty_seconds_hold_more_than_they_may(pauses: list[float]) -> None:
    async def granted() -> list[float]:
        clock, times = Clock(), []
        async with store(clock) as accounts:
            for pause in pauses:
                clock.now += pause
                if (await accounts.reserve(claim(KeyLimits(rpm=3)))).refused is None:
                    times.append(clock.now)
        return times

    times = asyncio.run(granted())
    assert all(last - first >= 60 for first, last in zip(times, times[3:], strict=False))


async def test_a_minute_counts_what_was_used_and_not_what_was_held() -> None:
    clock, limits = Clock(), KeyLimits(tpm=200)
    async with store(clock) as accounts:
        one = claim(limits)
        await accounts.reserve(one)
        await accounts.settle(ended(one, input=60, output=140))
        assert (await accounts.reserve(claim(limits, input=1, expected_output=1))).refused is QuotaKind.TOKENS
        clock.now += 61
        assert (await accounts.reserve(claim(limits))).refused is None


# A process and its store


class Failing(AccountStore):
    """Accounts that can be out of reach; `asked` is what was tried."""

    def __init__(self, accounts: AccountStore) -> None:
        self._accounts = accounts
        self.down = False
        self.late = False
        """Does what it is asked next, and does not say so in time."""
        self.asked: list[str] = []

    def _try(self, what: str) -> None:
        self.asked.append(what)
        if self.down:
            raise StoreUnavailable("down")

    async def reserve(self, claim: QuotaReservation) -> QuotaStatus:
        self._try("reserve")
        standing = await self._accounts.reserve(claim)
        if self.late:
            self.late = False
            raise StoreUnavailable("late")
        return standing

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
async def keeping(held_s: float = 1000.0) -> AsyncIterator[tuple[Failing, UsageLedger]]:
    async with store(Clock()) as opened:
        accounts = Failing(opened)
        books = UsageLedger(accounts, held_s=held_s)
        try:
            yield accounts, books
        finally:
            accounts.down = False
            await books.aclose()


ONE = KeyLimits(max_parallel=1)


async def test_a_place_that_nothing_came_of_is_free_again_and_in_no_ledger() -> None:
    async with keeping() as (accounts, books):
        one = claim(ONE)
        assert (await books.reserve(one)).limits == ONE
        assert (await books.reserve(claim(ONE))).refused is QuotaKind.PARALLEL
        books.release(one)
        async with asyncio.timeout(5):
            while (await books.reserve(claim(ONE))).refused is not None:
                await asyncio.sleep(0.001)
        assert await accounts.requests() == 0


async def test_what_could_not_be_written_is_written_as_soon_as_it_can_be() -> None:
    async with keeping() as (accounts, books):
        claims = [claim(KeyLimits(max_parallel=9)) for _ in range(3)]
        for one in claims:
            await books.reserve(one)
        accounts.down = True
        for one in claims:
            await books.settle(ended(one))
        assert await accounts.requests() == 0
        accounts.down = False
        async with asyncio.timeout(10):
            while await accounts.requests() < 3:
                await asyncio.sleep(0.01)


async def test_settlements_that_come_at_once_are_written_together() -> None:
    async with keeping() as (accounts, books):
        claims = [claim(KeyLimits(max_parallel=99)) for _ in range(50)]
        for one in claims:
            await books.reserve(one)
        await asyncio.gather(*(books.settle(ended(one)) for one in claims))
        assert await accounts.requests() == 50
        assert accounts.asked.count("settle") == 1


async def test_what_no_store_takes_is_lost_alone_and_said(caplog: pytest.LogCaptureFixture) -> None:
    async with keeping() as (accounts, books):
        claims = [claim(KeyLimits(max_parallel=99)) for _ in range(5)]
        for one in claims:
            await books.reserve(one)
        used = [ended(one, input=2**63 if number == 2 else 1) for number, one in enumerate(claims)]
        await asyncio.gather(*(books.settle(one) for one in used))
        assert await accounts.requests() == 4
        await books.settle(ended(claim(KeyLimits())))
        assert await accounts.requests() == 5
    assert [record.message for record in caplog.records] == ["usage record lost: the store rejects it"]


async def test_a_reservation_of_which_nothing_is_known_is_given_back() -> None:
    async with keeping() as (accounts, books):
        accounts.down = True
        with pytest.raises(StoreUnavailable):
            await books.reserve(claim(ONE))
        accounts.down = False
        async with asyncio.timeout(10):
            while "settle" not in accounts.asked:
                await asyncio.sleep(0.01)
        assert (await books.reserve(claim(ONE))).refused is None


async def test_a_store_that_is_late_once_refuses_nobody_who_insists_and_holds_once() -> None:
    async with keeping() as (accounts, books):
        accounts.late = True
        held = claim(KeyLimits(max_parallel=2))
        assert (await books.reserve(held, insist=True)).refused is None
        assert accounts.asked == ["reserve", "reserve"]
        assert (await books.reserve(replace(held, once="another"))).refused is None
        assert (await books.reserve(replace(held, once="a third"))).refused is not None
        accounts.late = True
        with pytest.raises(StoreUnavailable):
            await books.reserve(replace(held, once="a fourth"))


async def test_claims_are_renewed_as_long_as_they_are_open_and_no_longer() -> None:
    async with keeping(held_s=0.03) as (accounts, books):
        one = claim(ONE)
        await books.reserve(one)
        async with asyncio.timeout(5):
            while accounts.asked.count("extend") < 2:
                await asyncio.sleep(0.001)
        await books.settle(ended(one))
        await asyncio.sleep(0.03)
        seen = accounts.asked.count("extend")
        await asyncio.sleep(0.05)
        assert accounts.asked.count("extend") == seen
