"""Accounts in Redis, each in one hash slot: reserving and settling are one script each.

In a cluster, several accounts are reserved one after the other; if one account refuses, all reservations are undone.

Usage of the last minute is stored in buckets of one second. A bucket counts until even its last instant is a minute
old. Therefore usage never exceeds the limit in any period of one minute, whenever the period begins. Running sums are
stored with the buckets, so that a claim reads only the buckets that expired since the previous claim. All times are
those of the Redis server's clock.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import orjson

from unisono.core.quotas import (
    SHARE,
    USED,
    Account,
    LedgerLine,
    QuotaKind,
    QuotaReservation,
    QuotaStatus,
    TokenUsage,
    UsageRecord,
    budgets_of,
    combined,
    entries_of,
)
from unisono.errors import StoreUnavailable
from unisono.store.redis import keys
from unisono.store.redis.account_scripts import EXTEND_CLAIMS, RAISE_SPENT, RESERVE, SETTLE, UNDO_CLAIM
from unisono.store.redis.connection import Link, ScriptCall
from unisono.store.redis.script import Args, milliseconds

# Time in seconds for which the ids of settlements are stored, so that a repeated settlement is not counted twice.
SETTLED_S = 86_400.0
SETTLED_MS = milliseconds(SETTLED_S)
# Time for which a period's sums are stored after its end, in seconds.
PAST_PERIOD_S = 86_400.0

# Format in which the script reads the amounts of a settlement, and the function that returns these amounts.
AMOUNTS = " ".join([f"{name}=%d" for name in USED])
amounts_of = attrgetter(*USED)


class RedisAccounts:
    """Part of the Redis store for quotas: reservations, settlements and the usage ledger."""

    _link: Link
    # Accounts and days that this process has already added to the list of ledgers.
    _known_accounts: set[tuple[Account, str]]

    async def reserve(self, claim: QuotaReservation, *others: QuotaReservation) -> QuotaStatus:
        claims = (claim, *others)
        if others and self._link.is_cluster:
            return combined(claims, await self._reserve_in_turn(claims))
        return combined(claims, await self._reserve(claims))

    async def _reserve(self, claims: Sequence[QuotaReservation]) -> list[QuotaStatus]:
        """Reserve all claims in one script, and return their statuses in order.

        If a claim is refused, its status is the last element; later claims have no status.
        """
        named: list[str] = []
        args: Args = [SHARE]
        for claim in claims:
            named += _named(claim)
            args += _claim_args(claim)
        rows = await self._link.act(RESERVE, named, args)
        return [_to_status(claim, row) for claim, row in zip(claims, rows, strict=False)]

    async def _reserve_in_turn(self, claims: Sequence[QuotaReservation]) -> list[QuotaStatus]:
        """Reserve claims one after the other. If one is refused or fails, undo all of them.

        No limit is ever exceeded. Until the reservations of a refused request are undone, other requests may be refused
        because of them.
        """
        statuses: list[QuotaStatus] = []
        room: int | None = None
        try:
            for claim in claims:
                if room is not None:
                    claim = replace(claim, max_output=min(claim.max_output, room))
                (status,) = await self._reserve([claim])
                statuses.append(status)
                if status.output is not None:
                    room = status.output if room is None else min(room, status.output)
                if status.refused is not None:
                    break
        finally:
            if len(statuses) < len(claims) or statuses[-1].refused is not None:
                for claim in claims[: len(statuses) + 1]:
                    await self._link.act(UNDO_CLAIM, _named(claim)[:3], [claim.once, claim.requests])
        return statuses

    async def extend(self, *claims: QuotaReservation) -> None:
        of_account: dict[Account, list[QuotaReservation]] = defaultdict(list)
        for claim in claims:
            of_account[claim.account].append(claim)
        for held_claim in of_account.values():
            args: Args = [milliseconds(held_claim[0].for_s), *(claim.once for claim in held_claim)]
            await self._link.act(EXTEND_CLAIMS, _named(held_claim[0])[1:3], args)

    async def settle(self, *settlements: UsageRecord) -> None:
        places = [(one.entry.account, one.entry.day) for one in settlements]
        used = {place for place, one in zip(places, settlements, strict=True) if any(amounts_of(one.entry.used))}
        # Add a ledger to the list before an entry is written to it, because `ledger` reads listed ledgers only.
        new = used - self._known_accounts
        if new:
            await self._list(new)
        # Each settlement is a separate, idempotent operation. It returns whether its entry is the first of its account
        # and day.
        try:
            results = await self._link.act_each(SETTLE, [_to_script_call(one) for one in settlements])
        except StoreUnavailable:
            # Some entries may be written, and a repetition would not report them as the first ones. The repetition must
            # therefore list all these ledgers again.
            self._known_accounts -= used
            raise
        # If this entry is the first of a ledger that was listed before, the server has restarted and lost recent
        # writes, which may include the list.
        lost = {place for place, is_first in zip(places, results, strict=True) if is_first} - new
        if lost:
            self._known_accounts -= lost
            await self._list(lost)

    async def raise_spent(self, account: Account, period: str, ends: float | None, used: TokenUsage) -> None:
        spent = keys.account(account, period)[-1]
        await self._link.act(RAISE_SPENT, [spent], [used.tokens, used.cost, _sums_expiry(ends)])

    async def _list(self, places: set[tuple[Account, str]]) -> None:
        await self._link.write(*(("SADD", keys.LEDGERS, _listing(*place)) for place in places))
        self._known_accounts |= places

    async def ledger(self, since: str, until: str, account: Account | None = None) -> tuple[LedgerLine, ...]:
        (found,) = await self._link.read(("SMEMBERS", keys.LEDGERS))
        listed = sorted((day, tenant, key) for tenant, key, day in map(orjson.loads, found))
        places = [(Account(tenant, key), day) for day, tenant, key in listed if since <= day <= until]
        places = [place for place in places if account is None or place[0] == account]
        entries: list[LedgerLine] = []
        for start in range(0, len(places), KEYS_PER_READ):
            together = places[start : start + KEYS_PER_READ]
            # Read the parts by answering model first. An entry that is written between the two reads is then missing
            # in the parts, instead of exceeding the totals.
            parts = await self._link.read(*(("HGETALL", keys.ledger_served(*place)) for place in together))
            answers = await self._link.read(*(("HGETALL", keys.ledger(*place)) for place in together))
            for place, part, fields in zip(together, parts, answers, strict=True):
                served = {(model, other): used for name, used in _used(part) for model, other in [json.loads(name)]}
                entries += entries_of(*place, dict(_used(fields)), served)
        return tuple(entries)


KEYS_PER_READ = 256


def _to_script_call(one: UsageRecord) -> ScriptCall:
    """Return the keys and the arguments with which the script settles one usage record."""
    entry, claim = one.entry, one.claim
    named = keys.settlement(entry.account, entry.day, one.once)
    # The requested and the answering model form one field name.
    served = json.dumps([entry.model, entry.served]) if entry.served else ""
    ends = -1 if claim is None else _sums_expiry(claim.period_ends)
    # One argument for all amounts, because each argument costs time.
    args: Args = [entry.model, served, SETTLED_MS, int(claim is not None)]
    args += ["" if claim is None else claim.once, ends, AMOUNTS % amounts_of(entry.used)]
    return (named if claim is None else [*named, *_named(claim)]), args


def _used(fields: object) -> Iterable[tuple[str, TokenUsage]]:
    """Yield each model with its usage. `fields` maps `<kind of amount>:<model>` to amounts."""
    assert isinstance(fields, dict)
    of_model: dict[str, dict[str, int]] = defaultdict(dict)
    for field, amount in fields.items():
        name, _, model = field.decode("utf-8", "surrogatepass").partition(":")
        of_model[model][name] = int(amount)
    for model in sorted(of_model):
        yield model, TokenUsage(**of_model[model])


def _claim_args(claim: QuotaReservation) -> Args:
    limits = claim.limits
    return [
        *(claim.once, claim.input, claim.expected_output, claim.max_output, claim.input_cost, claim.output_price),
        *(milliseconds(claim.for_s), _expiry(claim), int(claim.is_owed)),
        *map(_bound, (limits.rpm, limits.tpm, limits.max_parallel, limits.token_budget, limits.money_budget)),
        int(limits.is_spend_known),
    ]


def _to_status(claim: QuotaReservation, row: Sequence[Any]) -> QuotaStatus:
    refused, again, output, requests, requests_ms, tokens, tokens_ms, spent = row
    return QuotaStatus(
        refused=QuotaKind(bytes(refused).decode()) if refused else None,
        retry_after_s=None if again < 0 else again / 1000,
        output=None if output < 0 else output,
        requests_left=None if requests < 0 else requests,
        requests_reset_s=requests_ms / 1000,
        tokens_left=None if tokens < 0 else tokens,
        tokens_reset_s=tokens_ms / 1000,
        limits=claim.limits,
        account=claim.account,
        budgets=() if spent < 0 else budgets_of(claim, spent),
    )


def _named(claim: QuotaReservation) -> list[str]:
    return keys.account(claim.account, claim.period)


def _bound(limit: int | None) -> str | int:
    return "" if limit is None else limit


def _expiry(claim: QuotaReservation) -> int:
    return -1 if claim.period_ends is None else milliseconds(claim.period_ends)


def _sums_expiry(period_ends: float | None) -> int:
    """Return when the sums of a budget period expire, in milliseconds since 1970; -1 for never."""
    return -1 if period_ends is None else milliseconds(period_ends + PAST_PERIOD_S)


def _listing(account: Account, day: str) -> bytes:
    return orjson.dumps([account.tenant, account.key, day])
