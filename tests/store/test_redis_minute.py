"""Property test of the per-minute sums in Redis: they equal the total of the single seconds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis import Redis

from tests.contract.servers import Server
from unisono.core.quotas import (
    WINDOW_S,
    Account,
    KeyLimits,
    LedgerLine,
    QuotaKind,
    QuotaReservation,
    TokenUsage,
    UsageRecord,
)
from unisono.store.redis import RedisStore, accounts
from unisono.store.redis.script import Script

START_MS = 1_700_000_000_000
SET_CLOCK = "local function clock() return tonumber(redis.call('GET', 'now')) end\n"
LIMITS = (KeyLimits(rpm=5, tpm=4_000), KeyLimits(rpm=1_000_000, tpm=1_000_000_000))
NAMES = count()

# Kind of step (a claim, or its settlement), amount of tokens and delay in milliseconds. A settlement of 1 has no usage.
Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "claim", "end"]),
        st.sampled_from([1, 30, 900, 5_000]),
        st.sampled_from([0, 1, 400, 1_000, 7_300, 59_000, 61_999, 200_000]),
    ),
    max_size=40,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patched:
        for name in ("RESERVE", "SETTLE"):
            patched.setattr(accounts, name, Script(SET_CLOCK + getattr(accounts, name).body))
        server = Server(tmp_path_factory.mktemp("redis")).start()
        yield server
        server.end()


class Minute:
    """Model of the minute: requests and tokens per second."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.tokens: Counter[int] = Counter()

    def left(self, amounts: Counter[int], limit: int, now: int) -> int:
        return max(0, limit - sum(amount for at, amount in amounts.items() if at >= now // 1000 - WINDOW_S))

    def reset_s(self, amounts: Counter[int], now: int) -> float:
        last = max((at for at, amount in amounts.items() if amount > 0 and at >= now // 1000 - WINDOW_S), default=0)
        return ((last + WINDOW_S + 1) * 1000 - now) / 1000 if last else 0.0

    def frees_s(self, amounts: Counter[int], needed: int, now: int) -> float:
        wait_ms = 0
        for at in sorted(at for at, amount in amounts.items() if amount > 0 and at >= now // 1000 - WINDOW_S):
            if needed <= 0:
                break
            wait_ms, needed = (at + WINDOW_S + 1) * 1000 - now, needed - amounts[at]
        return wait_ms / 1000


@example(limits=LIMITS[0], steps=[("claim", 30, 0), ("claim", 1, 7_300), ("end", 1, 0), ("claim", 5_000, 400)])
@given(limits=st.sampled_from(LIMITS), steps=STEPS)
def test_sums_equal_the_total_of_the_seconds(limits: KeyLimits, steps: list[Step], server: Server) -> None:
    asyncio.run(play(server, limits, steps))


async def play(server: Server, limits: KeyLimits, steps: list[Step]) -> None:
    clock = Redis(port=server.port)
    store = RedisStore(server.url, deadline_s=5.0)
    account, minute, now = Account("t", f"key{next(NAMES)}"), Minute(), START_MS
    open_claims: list[tuple[QuotaReservation, int]] = []
    for kind, amount, delay_ms in steps:
        now += delay_ms
        clock.set("now", now)
        second = now // 1000
        if kind == "claim":
            claim = claim_of(account, limits, amount, f"{len(open_claims)}-{now}-{next(NAMES)}")
            assert limits.rpm is not None
            assert limits.tpm is not None
            requests, tokens = (
                minute.left(minute.requests, limits.rpm, now),
                minute.left(minute.tokens, limits.tpm, now),
            )
            status = await store.reserve(claim)
            if not requests:
                assert (status.refused, status.retry_after_s) == (
                    QuotaKind.REQUESTS,
                    minute.frees_s(minute.requests, 1, now),
                )
            elif tokens < claim.input + claim.expected_output:
                assert status.refused is QuotaKind.TOKENS
            else:
                assert status.refused is None
                minute.requests[second] += 1
                minute.tokens[second] += claim.input + claim.expected_output
                open_claims.append((claim, second))
            assert status.requests_left == minute.left(minute.requests, limits.rpm, now)
            assert status.tokens_left == minute.left(minute.tokens, limits.tpm, now)
            assert status.requests_reset_s == minute.reset_s(minute.requests, now)
            assert status.tokens_reset_s == minute.reset_s(minute.tokens, now)
        elif open_claims:
            claim, claimed_at = open_claims.pop(amount % len(open_claims))
            used = TokenUsage() if amount == 1 else TokenUsage(requests=1, input=claim.input, output=amount)
            await store.settle(UsageRecord(claim.once, LedgerLine(account, "m", "2026-01-01", used), claim))
            change = used.input + used.output - claim.input - claim.expected_output
            if change > 0:
                minute.tokens[second] += change
            elif claimed_at >= second - WINDOW_S:
                minute.tokens[claimed_at] += change
    await store.aclose()
    clock.close()


def claim_of(account: Account, limits: KeyLimits, amount: int, once: str) -> QuotaReservation:
    return QuotaReservation(
        account=account,
        once=once,
        limits=limits,
        input=amount,
        expected_output=min(amount, 100),
        max_output=1_000,
        for_s=10_000.0,
        input_cost=0,
        output_price=0,
        period="all:0",
        period_ends=None,
        is_owed=False,
    )
