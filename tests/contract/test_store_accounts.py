"""Contract of every store for quotas: atomic reservations, settlements and the ledger."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from tests.contract.state import fresh
from tests.contract.stores import StoreFactory
from unisono.core.budget_period import Period
from unisono.core.quotas import (
    Account,
    BudgetState,
    KeyLimits,
    LedgerLine,
    QuotaKind,
    QuotaReservation,
    TokenUsage,
    UsageRecord,
)
from unisono.core.state_store import Store

DAY = "2026-11-21"


def account() -> Account:
    return Account("te:}am *\r\n", fresh("key"))


def claim(owner: Account, limits: KeyLimits, **changes: Any) -> QuotaReservation:
    reservation = QuotaReservation(
        owner, fresh("once"), limits, input=100, expected_output=50, max_output=1000, for_s=30.0
    )
    return replace(reservation, **changes)


def settlement(reservation: QuotaReservation, used: TokenUsage, model: str = "gpt-oss") -> UsageRecord:
    return UsageRecord(fresh("turn"), LedgerLine(reservation.account, model, DAY, used), reservation)


USED = TokenUsage(requests=1, input=90, cached=10, output=40, reasoning=5, cost=7)

LIMIT_CASES = {
    "requests": (KeyLimits(rpm=2), {}, QuotaKind.REQUESTS, 2),
    "no requests": (KeyLimits(rpm=0), {}, QuotaKind.REQUESTS, 0),
    "tokens": (KeyLimits(tpm=450), {}, QuotaKind.TOKENS, 3),
    "one token too few": (KeyLimits(tpm=449), {}, QuotaKind.TOKENS, 2),
    "parallel": (KeyLimits(max_parallel=4), {}, QuotaKind.PARALLEL, 4),
    "token budget": (KeyLimits(token_budget=551), {"max_output": 50}, QuotaKind.BUDGET_RESERVED, 4),
    "token budget below the input": (KeyLimits(token_budget=100), {}, QuotaKind.TOKEN_BUDGET, 0),
    "money budget": (
        KeyLimits(money_budget=30),
        {"input_cost": 9, "output_price": 20_000, "max_output": 50},
        QuotaKind.BUDGET_RESERVED,
        3,
    ),
    "money budget for input only": (KeyLimits(money_budget=20), {"input_cost": 10}, QuotaKind.BUDGET_RESERVED, 2),
}


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(("limits", "changes", "limit", "granted"), LIMIT_CASES.values(), ids=LIMIT_CASES)
async def test_concurrent_claims_are_granted_up_to_the_limit(
    factory: StoreFactory, limits: KeyLimits, changes: dict[str, Any], limit: QuotaKind, granted: int
) -> None:
    store, owner = await factory.open(), account()
    other = await factory.open() if factory.shared else store
    claims = [claim(owner, limits, **changes) for _ in range(12)]
    results = await asyncio.gather(*((store, other)[n % 2].reserve(each) for n, each in enumerate(claims)))
    assert sum(status.refused is None for status in results) == granted
    assert {status.refused for status in results} - {None} == {limit}
    # Other accounts are unaffected.
    elsewhere = await store.reserve(claim(account(), KeyLimits(rpm=1, tpm=150, max_parallel=1)))
    assert elsewhere.refused is None


async def test_repeated_claim_is_reserved_once(factory: StoreFactory) -> None:
    store, owner = await factory.open(), account()
    limits = KeyLimits(rpm=2, tpm=300, max_parallel=2, token_budget=2000)
    reservation = claim(owner, limits)
    first, again = await store.reserve(reservation), await store.reserve(reservation)
    assert first.refused is again.refused is None
    assert (first.output, first.requests_left, first.tokens_left) == (
        again.output,
        again.requests_left,
        again.tokens_left,
    )
    assert (await store.reserve(claim(owner, limits))).refused is None
    assert (await store.reserve(claim(owner, limits))).refused is not None


async def test_status_has_the_remaining_quota_and_reset_times(factory: StoreFactory) -> None:
    store, owner = await factory.open(), account()
    limits = KeyLimits(rpm=3, tpm=320)
    first = await store.reserve(claim(owner, limits))
    assert (first.requests_left, first.tokens_left) == (2, 170)
    assert 58 < first.requests_reset_s <= 61
    assert 58 < first.tokens_reset_s <= 61
    await store.reserve(claim(owner, limits))
    refused = await store.reserve(claim(owner, limits))
    assert (refused.refused, refused.requests_left, refused.tokens_left) == (QuotaKind.TOKENS, 1, 20)
    assert refused.retry_after_s is not None
    assert 56 < refused.retry_after_s <= 61
    never = await store.reserve(claim(owner, limits, input=500))
    assert (never.refused, never.retry_after_s) == (QuotaKind.TOKENS, None)
    unlimited = await store.reserve(claim(account(), KeyLimits(max_parallel=1)))
    assert (unlimited.requests_left, unlimited.tokens_left, unlimited.output) == (None, None, None)


async def test_settlement_replaces_the_reserved_amount(factory: StoreFactory) -> None:
    store, owner = await factory.open(), account()
    limits = KeyLimits(tpm=300, max_parallel=1, token_budget=1000)
    reservation = claim(owner, limits, expected_output=200)
    assert (await store.reserve(reservation)).refused is None
    assert (await store.reserve(claim(owner, limits, expected_output=1))).refused is QuotaKind.TOKENS
    record = settlement(reservation, USED)
    for _ in range(2):
        await store.settle(record)
    # 130 of 300 tokens are used now, and the parallel request has ended.
    next_status = await store.reserve(claim(owner, limits, input=70, expected_output=100))
    assert (next_status.refused, next_status.tokens_left) == (None, 0)


async def test_usage_above_the_reserved_amount_counts(factory: StoreFactory) -> None:
    store, owner = await factory.open(), account()
    limits = KeyLimits(tpm=1000)
    reservation = claim(owner, limits)
    await store.reserve(reservation)
    await store.settle(settlement(reservation, replace(USED, output=860)))
    assert (await store.reserve(claim(owner, limits, input=30, expected_output=30))).refused is QuotaKind.TOKENS
    assert (await store.reserve(claim(owner, limits, input=30, expected_output=20))).refused is None


async def test_claim_lapses_unless_it_is_extended(factory: StoreFactory) -> None:
    store, owner = await factory.open(), account()
    limits = KeyLimits(max_parallel=2, token_budget=300)
    extended, lapsed = claim(owner, limits, for_s=0.6), claim(owner, limits, for_s=0.6)
    for reservation in (extended, lapsed):
        assert (await store.reserve(reservation)).refused is None
    assert (await store.reserve(claim(owner, limits))).refused is QuotaKind.PARALLEL
    for _ in range(4):
        await asyncio.sleep(0.2)
        await store.extend(extended)
    assert (await store.reserve(claim(owner, limits))).refused is None
    assert (await store.reserve(claim(owner, limits))).refused is QuotaKind.PARALLEL
    # A lapsed claim is not reserved again, but its usage counts.
    await store.extend(lapsed)
    await store.settle(settlement(lapsed, USED))
    assert [entry.used for entry in await store.ledger(DAY, DAY, owner)] == [USED]


async def test_budget_is_never_exceeded_and_resets_in_the_next_period(factory: StoreFactory) -> None:
    store, owner = await factory.open(), account()
    limits = KeyLimits(token_budget=1000)
    ends = time.time() + 100

    async def spend() -> int:
        reservation = claim(owner, limits, period="day:1", period_ends=ends, max_output=400)
        status = await store.reserve(reservation)
        if status.refused is QuotaKind.BUDGET_RESERVED:
            assert status.retry_after_s is None
            return 0
        if status.refused is not None:
            assert status.refused is QuotaKind.TOKEN_BUDGET
            assert status.retry_after_s is not None
            assert 90 < status.retry_after_s <= 100
            return 0
        assert status.output is not None
        await asyncio.sleep(0)
        await store.settle(settlement(reservation, TokenUsage(requests=1, input=100, output=status.output)))
        return 100 + status.output

    spent = 0
    while tokens := sum(await asyncio.gather(*(spend() for _ in range(20)))):
        spent += tokens
    assert 900 <= spent <= 1000
    assert sum(entry.used.tokens for entry in await store.ledger(DAY, DAY, owner)) == spent
    assert (await store.reserve(claim(owner, limits, period="day:2", period_ends=ends))).refused is None


BUDGETS = {
    "tokens": (KeyLimits(token_budget=210), {}, TokenUsage(requests=1, input=40, output=20)),
    "money": (KeyLimits(money_budget=30), {"input_cost": 30}, TokenUsage(requests=1, input=100, cost=14)),
}


@pytest.mark.parametrize(("limits", "changes", "first_usage"), BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("period_s", [None, 100.0], ids=["no period", "period"])
async def test_refusal_distinguishes_reserved_from_spent_budget(
    factory: StoreFactory,
    limits: KeyLimits,
    changes: dict[str, Any],
    first_usage: TokenUsage,
    period_s: float | None,
) -> None:
    store, owner = await factory.open(), account()
    period_ends = None if period_s is None else time.time() + period_s
    changes = {**changes, "period_ends": period_ends, "period": "day:1"}
    running = claim(owner, limits, **changes)
    assert (await store.reserve(running)).refused is None
    refusal = await store.reserve(claim(owner, limits, **changes))
    assert (refusal.refused, refusal.retry_after_s) == (QuotaKind.BUDGET_RESERVED, None)
    await store.settle(settlement(running, first_usage))
    small = {**changes, "input_cost": 16} if "input_cost" in changes else changes
    last = claim(owner, limits, **small)
    assert (await store.reserve(last)).refused is None
    await store.settle(settlement(last, TokenUsage(requests=1, input=100, output=60, cost=16)))
    refusal = await store.reserve(claim(owner, limits, **small))
    assert refusal.refused in {QuotaKind.TOKEN_BUDGET, QuotaKind.MONEY_BUDGET}
    assert (refusal.retry_after_s is None) == (period_ends is None)


async def test_output_limit_fits_the_remaining_budget(factory: StoreFactory) -> None:
    store, owner = await factory.open(), account()
    limits = KeyLimits(money_budget=100)
    priced = {"input_cost": 7, "output_price": 333_333}
    reservation = claim(owner, limits, **priced)
    status = await store.reserve(reservation)
    # 93 micro-USD are left for output: 279 tokens, of which a request without `max_tokens` gets a quarter.
    assert status.output == 69
    await store.settle(settlement(reservation, TokenUsage(requests=1, input=100, output=69, cost=30)))
    tight = await store.reserve(claim(owner, limits, expected_output=500, max_output=500, **priced))
    assert tight.output == 189


async def test_status_has_the_spent_amount_of_each_money_budget(factory: StoreFactory) -> None:
    store, own, team = await factory.open(), account(), Account("\x00shared", fresh("team t"))
    priced = {"input_cost": 7, "output_price": 333_333}
    first = claim(own, KeyLimits(money_budget=100, rpm=9), period="day:1", **priced)
    assert (await store.reserve(first)).budgets == (BudgetState(own, 100, 0, "day:1"),)
    assert (await store.reserve(claim(own, KeyLimits(rpm=9, token_budget=10_000)))).budgets == ()
    await store.settle(settlement(first, TokenUsage(requests=1, cost=30)))
    second = claim(own, KeyLimits(money_budget=100), period="day:1", **priced)
    shared = replace(second, account=team, limits=KeyLimits(money_budget=1), period="none")
    refused = await store.reserve(second, shared)
    assert refused.refused is QuotaKind.MONEY_BUDGET
    assert refused.budgets == (BudgetState(own, 100, 30, "day:1"), BudgetState(team, 1, 0))


async def test_budget_renews_at_midnight_of_a_time_zone(factory: StoreFactory) -> None:
    store, owner, zone = await factory.open(), account(), ZoneInfo("Europe/Berlin")
    # Clocks change on 30 March 2036, a day of 23 hours that ends at 22:00 UTC.
    times = ["2036-03-29T23:30+00:00", "2036-03-30T21:30+00:00", "2036-03-30T22:30+00:00"]
    for at, spent in zip(times, [0, 100, 0], strict=True):
        start, ends = Period("every", 86_400).window(datetime.fromisoformat(at).timestamp(), zone=zone)
        period = f"every:{start:.0f}"
        one = claim(owner, KeyLimits(money_budget=100), period=period, period_ends=ends, input_cost=7)
        status = await store.reserve(one)
        assert status.budgets == (BudgetState(owner, 100, spent, period, period_ends=ends),)
        assert (status.refused is None) == (not spent)
        if status.refused is None:
            await store.settle(settlement(one, TokenUsage(requests=1, cost=100)))


async def test_soft_budget_has_a_state_and_refuses_nothing(factory: StoreFactory) -> None:
    store, own, team = await factory.open(), account(), Account("\x00shared", fresh("team t"))
    priced = {"input_cost": 7, "output_price": 333_333}
    soft, both = KeyLimits(soft_budget=10), KeyLimits(money_budget=1_000, soft_budget=10)
    for spent in (0, 30, 60):
        first = claim(own, soft, period="day:1", **priced)
        second = replace(first, account=team, limits=both, period="none")
        status = await store.reserve(first, second)
        assert status.refused is None
        assert status.budgets == (
            BudgetState(own, None, spent, "day:1", soft_limit=10),
            BudgetState(team, 1_000, spent, soft_limit=10),
        )
        for one in (first, second):
            await store.settle(settlement(one, TokenUsage(requests=1, cost=30)))
    (budget,) = (await store.reserve(claim(own, soft, period="day:2", **priced))).budgets
    assert budget.spent == 0


async def test_owed_claim_is_neither_refused_nor_counted_as_a_request(factory: StoreFactory) -> None:
    store, owner = await factory.open(), account()
    limits = KeyLimits(rpm=1, tpm=1, max_parallel=1, token_budget=1, money_budget=1)
    for _ in range(2):
        status = await store.reserve(claim(owner, limits, is_owed=True, input_cost=5, output_price=9_000_000))
        assert (status.refused, status.output, status.requests_left) == (None, 50, 1)
    assert (await store.reserve(claim(owner, KeyLimits(rpm=1)))).refused is None
    status = await store.reserve(claim(owner, KeyLimits(rpm=1), is_owed=True))
    assert (status.refused, status.requests_left) == (None, 0)
    assert (await store.reserve(claim(owner, KeyLimits(rpm=1)))).refused is QuotaKind.REQUESTS


async def test_ledger_sums_by_account_model_and_day(factory: StoreFactory) -> None:
    store = await factory.open()
    other = await factory.open() if factory.shared else store
    ann, bob = Account("a", "key_a"), Account("b")
    lines = [
        LedgerLine(owner, model, day, USED)
        for owner in (ann, bob)
        for model in ("gpt-oss", "name: with\x00 all")
        for day in ("2026-11-20", DAY)
    ]
    for current_store in (store, other):
        await current_store.settle(*(UsageRecord(fresh("once"), entry) for entry in lines))
    doubled = [replace(entry, used=USED + USED) for entry in lines]
    expected = sorted(doubled, key=lambda line: (line.day, line.account.tenant, line.account.key, line.model))
    assert list(await other.ledger("2026-11-20", DAY)) == expected
    assert list(await store.ledger(DAY, DAY, bob)) == [
        entry for entry in expected if entry.account == bob and entry.day == DAY
    ]
    assert await store.ledger("2027-01-01", "2027-12-31") == ()


async def test_repeated_settlement_counts_once_across_stores(factory: StoreFactory) -> None:
    store = await factory.open()
    other = await factory.open() if factory.shared else store
    owner = account()
    record = UsageRecord("once", LedgerLine(owner, "m", DAY, USED))
    await asyncio.gather(*(each.settle(record, record) for each in (store, other) * 5))
    assert [entry.used for entry in await store.ledger(DAY, DAY, owner)] == [USED]


async def test_settlements_with_one_id_are_cumulative(factory: StoreFactory) -> None:
    store = await factory.open()
    other = await factory.open() if factory.shared else store
    owner, once = account(), fresh("response")
    limits = KeyLimits(tpm=10_000, max_parallel=2, token_budget=1_000)
    claims = [claim(owner, limits, max_output=100) for _ in range(2)]
    for reservation in claims:
        assert (await store.reserve(reservation)).refused is None
    partial = replace(USED, output=10, reasoning=0, cost=3)
    failed = replace(USED, errors=1, cached=0)
    for used, settler, held in ((partial, store, claims[0]), (failed, other, claims[1]), (partial, store, claims[0])):
        record = UsageRecord(once, LedgerLine(owner, "m", DAY, used, "fallback"), held)
        await asyncio.gather(settler.settle(record), settler.settle(record))
    [entry] = await store.ledger(DAY, DAY, owner)
    assert (entry.used, entry.served) == (replace(USED, errors=1), "fallback")
    # Both claims are released; the budget and the minute contain the sum.
    next_status = await store.reserve(claim(owner, limits, input=1, expected_output=869, max_output=2000))
    assert (next_status.refused, next_status.output) == (None, 869)
    assert next_status.tokens_left == 10_000 - 130 - 870


async def test_store_has_an_empty_ledger_and_accepts_empty_calls(factory: StoreFactory) -> None:
    store: Store = await factory.open()
    assert await store.ledger("0000-00-00", "9999-12-31") == ()
    await store.extend()
    await store.settle()


async def test_the_sums_of_a_period_can_be_raised_but_not_lowered(factory: StoreFactory) -> None:
    store, owner = await factory.open(), account()
    limits = KeyLimits(token_budget=1_000, money_budget=10)
    await store.raise_spent(owner, "none", None, TokenUsage(input=500, output=100, cost=6))
    spent = (await store.reserve(reserved := claim(owner, limits))).budgets
    assert [budget.spent for budget in spent] == [6]
    await store.settle(settlement(reserved, USED))
    await store.raise_spent(owner, "none", None, TokenUsage(input=400, cost=2))
    refused = await store.reserve(claim(owner, limits))
    assert ([budget.spent for budget in refused.budgets], refused.refused) == ([13], QuotaKind.MONEY_BUDGET)
    assert (await store.reserve(claim(owner, limits, period="month:0"))).refused is None
