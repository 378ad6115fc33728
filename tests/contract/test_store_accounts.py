"""Accounts, as every store must keep them: claims are all or nothing, the truth replaces them once, and every use is
in the ledger."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.contract.state import fresh
from tests.contract.stores import Home
from unisono.core.access import KeyLimits
from unisono.core.quotas import Account, LedgerLine, QuotaKind, QuotaReservation, TokenUsage, UsageRecord
from unisono.core.state_store import Store

DAY = "2026-11-21"


def account() -> Account:
    return Account("te:}am *\r\n", fresh("key"))


def claim(whose: Account, limits: KeyLimits, **changes: Any) -> QuotaReservation:
    made = QuotaReservation(whose, fresh("once"), limits, input=100, expected_output=50, max_output=1000, for_s=30.0)
    return replace(made, **changes)


def ended(of: QuotaReservation, used: TokenUsage, model: str = "gpt-oss") -> UsageRecord:
    return UsageRecord(fresh("turn"), LedgerLine(of.account, model, DAY, used), of)


USED = TokenUsage(requests=1, input=90, cached=10, output=40, reasoning=5, cost=7)

REFUSED = {
    "requests": (KeyLimits(rpm=2), {}, QuotaKind.REQUESTS, 2),
    "no request at all": (KeyLimits(rpm=0), {}, QuotaKind.REQUESTS, 0),
    "tokens": (KeyLimits(tpm=450), {}, QuotaKind.TOKENS, 3),
    "one token too few": (KeyLimits(tpm=449), {}, QuotaKind.TOKENS, 2),
    "parallel": (KeyLimits(max_parallel=4), {}, QuotaKind.PARALLEL, 4),
    "a budget of tokens": (KeyLimits(token_budget=551), {"max_output": 50}, QuotaKind.BUDGET_RESERVED, 4),
    "a budget too small for what is sent": (KeyLimits(token_budget=100), {}, QuotaKind.TOKEN_BUDGET, 0),
    "a budget of money": (
        KeyLimits(money_budget=30),
        {"input_cost": 9, "output_price": 20_000, "max_output": 50},
        QuotaKind.BUDGET_RESERVED,
        3,
    ),
    "what is sent costs money alone": (KeyLimits(money_budget=20), {"input_cost": 10}, QuotaKind.BUDGET_RESERVED, 2),
}


@pytest.mark.parametrize(("limits", "wants", "limit", "granted"), REFUSED.values(), ids=REFUSED)
async def test_as_many_claims_are_granted_at_once_as_there_is_room_for(
    home: Home, limits: KeyLimits, wants: dict[str, Any], limit: QuotaKind, granted: int
) -> None:
    store, whose = await home.open(), account()
    other = await home.open() if home.shared else store
    wanted = [claim(whose, limits, **wants) for _ in range(12)]
    stands = await asyncio.gather(*((store, other)[n % 2].reserve(one) for n, one in enumerate(wanted)))
    assert sum(one.refused is None for one in stands) == granted
    assert {one.refused for one in stands} - {None} == {limit}
    # Another account is another matter.
    elsewhere = await store.reserve(claim(account(), KeyLimits(rpm=1, tpm=150, max_parallel=1)))
    assert elsewhere.refused is None


async def test_a_claim_that_is_made_again_is_held_once(home: Home) -> None:
    store, whose = await home.open(), account()
    limits = KeyLimits(rpm=2, tpm=300, max_parallel=2, token_budget=2000)
    one = claim(whose, limits)
    first, again = await store.reserve(one), await store.reserve(one)
    assert first.refused is again.refused is None
    assert (first.output, first.requests_left, first.tokens_left) == (
        again.output,
        again.requests_left,
        again.tokens_left,
    )
    assert (await store.reserve(claim(whose, limits))).refused is None
    assert (await store.reserve(claim(whose, limits))).refused is not None


async def test_what_is_left_is_told_and_when_there_is_room_again(home: Home) -> None:
    store, whose = await home.open(), account()
    limits = KeyLimits(rpm=3, tpm=320)
    first = await store.reserve(claim(whose, limits))
    assert (first.requests_left, first.tokens_left) == (2, 170)
    assert 58 < first.requests_reset_s <= 61
    assert 58 < first.tokens_reset_s <= 61
    await store.reserve(claim(whose, limits))
    refused = await store.reserve(claim(whose, limits))
    assert (refused.refused, refused.requests_left, refused.tokens_left) == (QuotaKind.TOKENS, 1, 20)
    assert refused.retry_after_s is not None
    assert 56 < refused.retry_after_s <= 61
    never = await store.reserve(claim(whose, limits, input=500))
    assert (never.refused, never.retry_after_s) == (QuotaKind.TOKENS, None)
    unlimited = await store.reserve(claim(account(), KeyLimits(max_parallel=1)))
    assert (unlimited.requests_left, unlimited.tokens_left, unlimited.output) == (None, None, None)


async def test_the_truth_takes_the_place_of_what_was_held(home: Home) -> None:
    store, whose = await home.open(), account()
    limits = KeyLimits(tpm=300, max_parallel=1, token_budget=1000)
    one = claim(whose, limits, expected_output=200)
    assert (await store.reserve(one)).refused is None
    assert (await store.reserve(claim(whose, limits, expected_output=1))).refused is QuotaKind.TOKENS
    truth = ended(one, USED)
    for _ in range(2):
        await store.settle(truth)
    # 130 tokens of 300 are taken now, and the place is free.
    next_one = await store.reserve(claim(whose, limits, input=70, expected_output=100))
    assert (next_one.refused, next_one.tokens_left) == (None, 0)


async def test_more_than_was_held_counts_too(home: Home) -> None:
    store, whose = await home.open(), account()
    limits = KeyLimits(tpm=1000)
    one = claim(whose, limits)
    await store.reserve(one)
    await store.settle(ended(one, replace(USED, output=860)))
    assert (await store.reserve(claim(whose, limits, input=30, expected_output=30))).refused is QuotaKind.TOKENS
    assert (await store.reserve(claim(whose, limits, input=30, expected_output=20))).refused is None


async def test_a_claim_that_nobody_renews_lapses(home: Home) -> None:
    store, whose = await home.open(), account()
    limits = KeyLimits(max_parallel=2, token_budget=300)
    kept, left = claim(whose, limits, for_s=0.6), claim(whose, limits, for_s=0.6)
    for one in (kept, left):
        assert (await store.reserve(one)).refused is None
    assert (await store.reserve(claim(whose, limits))).refused is QuotaKind.PARALLEL
    for _ in range(4):
        await asyncio.sleep(0.2)
        await store.extend(kept)
    assert (await store.reserve(claim(whose, limits))).refused is None
    assert (await store.reserve(claim(whose, limits))).refused is QuotaKind.PARALLEL
    # What has lapsed is not held again, and what it used counts all the same.
    await store.extend(left)
    await store.settle(ended(left, USED))
    assert [entry.used for entry in await store.ledger(DAY, DAY, whose)] == [USED]


async def test_a_budget_is_never_overdrawn_and_full_again_in_the_next_period(home: Home) -> None:
    store, whose = await home.open(), account()
    limits = KeyLimits(token_budget=1000)
    ends = time.time() + 100

    async def turn() -> int:
        one = claim(whose, limits, period="day:1", period_ends=ends, max_output=400)
        stands = await store.reserve(one)
        if stands.refused is QuotaKind.BUDGET_RESERVED:
            assert stands.retry_after_s is None
            return 0
        if stands.refused is not None:
            assert stands.refused is QuotaKind.TOKEN_BUDGET
            assert stands.retry_after_s is not None
            assert 90 < stands.retry_after_s <= 100
            return 0
        assert stands.output is not None
        await asyncio.sleep(0)
        await store.settle(ended(one, TokenUsage(requests=1, input=100, output=stands.output)))
        return 100 + stands.output

    spent = 0
    while took := sum(await asyncio.gather(*(turn() for _ in range(20)))):
        spent += took
    assert 900 <= spent <= 1000
    assert sum(entry.used.tokens for entry in await store.ledger(DAY, DAY, whose)) == spent
    assert (await store.reserve(claim(whose, limits, period="day:2", period_ends=ends))).refused is None


BUDGETS = {
    "tokens": (KeyLimits(token_budget=210), {}, TokenUsage(requests=1, input=40, output=20)),
    "money": (KeyLimits(money_budget=30), {"input_cost": 30}, TokenUsage(requests=1, input=100, cost=14)),
}


@pytest.mark.parametrize(("limits", "wants", "half"), BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("period_ends", [None, time.time() + 100], ids=["no period", "period"])
async def test_reserved_budget_is_told_from_spent_budget(
    home: Home, limits: KeyLimits, wants: dict[str, Any], half: TokenUsage, period_ends: float | None
) -> None:
    store, whose = await home.open(), account()
    wants = {**wants, "period_ends": period_ends, "period": "day:1"}
    running = claim(whose, limits, **wants)
    assert (await store.reserve(running)).refused is None
    refusal = await store.reserve(claim(whose, limits, **wants))
    assert (refusal.refused, refusal.retry_after_s) == (QuotaKind.BUDGET_RESERVED, None)
    await store.settle(ended(running, half))
    small = {**wants, "input_cost": 16} if "input_cost" in wants else wants
    last = claim(whose, limits, **small)
    assert (await store.reserve(last)).refused is None
    await store.settle(ended(last, TokenUsage(requests=1, input=100, output=60, cost=16)))
    refusal = await store.reserve(claim(whose, limits, **small))
    assert refusal.refused in {QuotaKind.TOKEN_BUDGET, QuotaKind.MONEY_BUDGET}
    assert (refusal.retry_after_s is None) == (period_ends is None)


async def test_no_turn_costs_more_than_the_budget_has(home: Home) -> None:
    store, whose = await home.open(), account()
    limits = KeyLimits(money_budget=100)
    priced = {"input_cost": 7, "output_price": 333_333}
    one = claim(whose, limits, **priced)
    stands = await store.reserve(one)
    # 93 micro-USD are left for answers: 279 tokens, of which a turn without a bound gets a fourth.
    assert stands.output == 69
    await store.settle(ended(one, TokenUsage(requests=1, input=100, output=69, cost=30)))
    tight = await store.reserve(claim(whose, limits, expected_output=500, max_output=500, **priced))
    assert tight.output == 189


async def test_what_was_let_in_before_is_not_refused(home: Home) -> None:
    store, whose = await home.open(), account()
    limits = KeyLimits(rpm=1, tpm=1, max_parallel=1, token_budget=1, money_budget=1)
    for _ in range(2):
        stands = await store.reserve(claim(whose, limits, is_owed=True, input_cost=5, output_price=9_000_000))
        assert (stands.refused, stands.output) == (None, 50)


async def test_the_ledger_sums_by_account_model_and_day(home: Home) -> None:
    store = await home.open()
    other = await home.open() if home.shared else store
    ann, bob = Account("a", "key_a"), Account("b")
    made = [
        LedgerLine(whose, model, day, USED)
        for whose in (ann, bob)
        for model in ("gpt-oss", "name: with\x00 all")
        for day in ("2026-11-20", DAY)
    ]
    for store_now in (store, other):
        await store_now.settle(*(UsageRecord(fresh("once"), entry) for entry in made))
    twice = [replace(entry, used=USED + USED) for entry in made]
    expected = sorted(twice, key=lambda one: (one.day, one.account.tenant, one.account.key, one.model))
    assert list(await other.ledger("2026-11-20", DAY)) == expected
    assert list(await store.ledger(DAY, DAY, bob)) == [
        entry for entry in expected if entry.account == bob and entry.day == DAY
    ]
    assert await store.ledger("2027-01-01", "2027-12-31") == ()


async def test_a_turn_that_is_settled_again_counts_once_through_any_store(home: Home) -> None:
    store = await home.open()
    other = await home.open() if home.shared else store
    whose = account()
    one = UsageRecord("once", LedgerLine(whose, "m", DAY, USED))
    await asyncio.gather(*(each.settle(one, one) for each in (store, other) * 5))
    assert [entry.used for entry in await store.ledger(DAY, DAY, whose)] == [USED]


async def test_settlements_of_one_id_are_cumulative(home: Home) -> None:
    store = await home.open()
    other = await home.open() if home.shared else store
    whose, once = account(), fresh("response")
    limits = KeyLimits(tpm=10_000, max_parallel=2, token_budget=1_000)
    claims = [claim(whose, limits, max_output=100) for _ in range(2)]
    for one in claims:
        assert (await store.reserve(one)).refused is None
    partial = replace(USED, output=10, reasoning=0, cost=3)
    failed = replace(USED, errors=1, cached=0)
    for used, settler, of in ((partial, store, claims[0]), (failed, other, claims[1]), (partial, store, claims[0])):
        settlement = UsageRecord(once, LedgerLine(whose, "m", DAY, used, "fallback"), of)
        await asyncio.gather(settler.settle(settlement), settler.settle(settlement))
    [entry] = await store.ledger(DAY, DAY, whose)
    assert (entry.used, entry.served) == (replace(USED, errors=1), "fallback")
    # Both claims are given back, and the budget and the minute have the sum.
    next_one = await store.reserve(claim(whose, limits, input=1, expected_output=869, max_output=2000))
    assert (next_one.refused, next_one.output) == (None, 869)
    assert next_one.tokens_left == 10_000 - 130 - 870


async def test_stores_keep_accounts(home: Home) -> None:
    store: Store = await home.open()
    assert await store.ledger("0000-00-00", "9999-12-31") == ()
    await store.extend()
    await store.settle()
