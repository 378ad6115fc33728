"""Contract of every store for the claims of one request: of its key, its user and its team."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.contract.state import fresh
from tests.contract.stores import StoreFactory
from unisono.core.quotas import (
    SHARED_TENANT,
    Account,
    KeyLimits,
    LedgerLine,
    QuotaKind,
    QuotaReservation,
    QuotaStatus,
    TokenUsage,
    UsageRecord,
)
from unisono.core.state_store import Store

ROOMY = KeyLimits(rpm=100, tpm=1_000_000, max_parallel=100, token_budget=1_000_000)


def accounts() -> tuple[Account, Account, Account]:
    """Return the accounts of a key, its user and its team."""
    return (
        Account("team", fresh("key")),
        Account(SHARED_TENANT, fresh("user")),
        Account(SHARED_TENANT, fresh("team")),
    )


def claims(owners: tuple[Account, ...], *limits: KeyLimits, **changes: Any) -> tuple[QuotaReservation, ...]:
    once = fresh("once")
    return tuple(
        replace(QuotaReservation(owner, once, each, 100, 50, 50, 30.0, input_cost=9, output_price=20_000), **changes)
        for owner, each in zip(owners, limits, strict=True)
    )


async def release(store: Store, *reserved: QuotaReservation) -> None:
    records = [
        UsageRecord(fresh("end"), LedgerLine(claim.account, "m", "2026-11-27", TokenUsage(requests=1)), claim)
        for claim in reserved
    ]
    await store.settle(*records)


TIGHT = {
    "requests": (KeyLimits(rpm=3), QuotaKind.REQUESTS),
    "tokens": (KeyLimits(tpm=450), QuotaKind.TOKENS),
    "parallel": (KeyLimits(max_parallel=3), QuotaKind.PARALLEL),
    "token budget": (KeyLimits(token_budget=450), QuotaKind.BUDGET_RESERVED),
    "money budget": (KeyLimits(money_budget=30), QuotaKind.BUDGET_RESERVED),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("position", range(3), ids=["key", "user", "team"])
@pytest.mark.parametrize(("tight", "limit"), TIGHT.values(), ids=TIGHT)
async def test_tightest_limit_decides_and_a_refusal_reserves_nothing(
    factory: StoreFactory, tight: KeyLimits, limit: QuotaKind, position: int
) -> None:
    store, owners = await factory.open(), accounts()
    other = await factory.open() if factory.shared else store
    limits = [tight if n == position else ROOMY for n in range(3)]
    requests = [claims(owners, *limits) for _ in range(12)]
    statuses = await asyncio.gather(*((store, other)[n % 2].reserve(*each) for n, each in enumerate(requests)))
    granted = [status for status in statuses if status.refused is None]
    refused = [status for status in statuses if status.refused is not None]
    assert len(granted) == 3
    assert {(status.refused, status.account) for status in refused} == {(limit, owners[position])}
    for n, owner in enumerate(owners):
        if n != position:
            # The others count the granted requests only.
            (probe,) = claims((owner,), ROOMY)
            status = await store.reserve(probe)
            assert (status.requests_left, status.tokens_left) == (96, 1_000_000 - 4 * 150)


async def test_status_has_the_least_of_what_remains(factory: StoreFactory) -> None:
    store, owners = await factory.open(), accounts()
    first = KeyLimits(rpm=10, tpm=1_000, token_budget=10_000)
    second = KeyLimits(rpm=5, tpm=2_000, token_budget=160)
    status = await store.reserve(*claims(owners, first, second, KeyLimits(), max_output=900, expected_output=60))
    assert (status.requests_left, status.tokens_left, status.output) == (4, 840, 60)
    assert [(name, limit) for name, limit, _, _ in status.windows()] == [("requests", 5), ("tokens", 1_000)]


async def test_every_account_holds_what_the_answer_may_cost(factory: StoreFactory) -> None:
    store, owners = await factory.open(), accounts()
    limits = (KeyLimits(token_budget=10_000), KeyLimits(token_budget=160), KeyLimits(token_budget=10_000))
    first = await store.reserve(*claims(owners, *limits, max_output=9_000, expected_output=60))
    assert first.output == 60
    (team,) = claims((owners[2],), KeyLimits(token_budget=320), max_output=9_000, expected_output=60)
    # The team has 160 tokens left beside the 160 that the user permits.
    assert (await store.reserve(team)).output == 60


async def test_repeated_claims_are_reserved_once(factory: StoreFactory) -> None:
    store, owners = await factory.open(), accounts()
    limits = (KeyLimits(rpm=1), KeyLimits(tpm=150), KeyLimits(max_parallel=1, token_budget=150))
    wanted = claims(owners, *limits)
    statuses = [await store.reserve(*wanted) for _ in range(3)]
    assert {(status.refused, status.output, status.requests_left) for status in statuses} == {(None, 50, 0)}
    assert (await store.reserve(*claims(owners, *limits))).refused is QuotaKind.REQUESTS


async def test_released_claims_free_every_account(factory: StoreFactory) -> None:
    store, owners = await factory.open(), accounts()
    limits = (KeyLimits(max_parallel=1), KeyLimits(token_budget=150), KeyLimits(tpm=300))
    wanted = claims(owners, *limits)
    assert (await store.reserve(*wanted)).refused is None
    assert (await store.reserve(*claims(owners, *limits))).refused is QuotaKind.PARALLEL
    await release(store, *wanted)
    assert (await store.reserve(*claims(owners, *limits))).refused is None


async def test_lapsed_claims_hold_nothing(factory: StoreFactory) -> None:
    store, owners = await factory.open(), accounts()
    limits = (KeyLimits(max_parallel=1), KeyLimits(max_parallel=1), KeyLimits(token_budget=150))
    assert (await store.reserve(*claims(owners, *limits, for_s=0.05))).refused is None
    status = QuotaStatus(refused=QuotaKind.PARALLEL)
    while status.refused is not None:
        status = await store.reserve(*claims(owners, *limits))


async def test_requests_of_two_teams_share_their_user_without_loss(factory: StoreFactory) -> None:
    store = await factory.open()
    user, teams = Account(SHARED_TENANT, fresh("user")), [Account(SHARED_TENANT, fresh("team")) for _ in range(2)]
    team_limits = (KeyLimits(rpm=2), KeyLimits(rpm=100))
    requests = [claims((user, teams[n % 2]), KeyLimits(rpm=6), team_limits[n % 2]) for n in range(40)]
    granted = 0
    for each in requests:
        granted += (await store.reserve(*each)).refused is None
    # Requests that the small team refuses take nothing of the user.
    assert granted == 6
