"""SQL for the quotas of accounts, in the caller's transaction.

The functions do the same as the Redis scripts for accounts, but use the gateway's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final

from unisono.core.frozen import dataclass
from unisono.core.key_rate_limits import Minute
from unisono.core.quotas import (
    MILLION,
    SHARE,
    USED,
    WINDOW_S,
    Account,
    BudgetState,
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
from unisono.store.sqlite.connection import Transaction

# Time in seconds for which the ids of settlements are stored, so that a repeated settlement is not counted twice.
SETTLED_S: Final = 86_400.0
# Time for which a period's sums are stored after its end, in seconds.
PAST_PERIOD_S: Final = 86_400.0
# Expiry of sums whose budget has no period, in seconds since 1970.
FOR_EVER: Final = 1e15

COLUMNS: Final = ", ".join(USED)

_amounts = attrgetter(*USED)
_account_columns = attrgetter("tenant", "key")


def _insert(table: str, keys: int) -> str:
    return (
        f"INSERT INTO {table} VALUES ({', '.join('?' * (keys + len(USED)))}) "  # noqa: S608 - names of our own
        "ON CONFLICT DO UPDATE SET " + ", ".join(f"{name} = {name} + excluded.{name}" for name in USED)
    )


# The ledger contains all usage by requested model, as earlier versions read it. The second table contains the part that
# other models answered.
ENTER: Final = _insert("ledger", 4)
ENTER_SERVED: Final = _insert("ledger_served", 5)
# Reads the amounts of a settlement that are already counted.
COUNTED: Final = f"SELECT {COLUMNS} FROM account_counted WHERE tenant = ? AND key = ? AND once = ?"  # noqa: S608
# Extends the lifetime of the mark that a settlement is counted, which prevents counting a repeated settlement twice.
EXTEND_MARK: Final = "UPDATE account_settled SET expires = ? WHERE tenant = ? AND key = ? AND once = ?"
COUNT: Final = f"INSERT OR REPLACE INTO account_counted VALUES ({', '.join('?' * (4 + len(USED)))})"  # noqa: S608


def reserve(act: Transaction, claims: Sequence[QuotaReservation]) -> QuotaStatus:
    statuses: list[QuotaStatus] = []
    rooms: list[BudgetRoom] = []
    for position, claim in enumerate(claims):
        found = _check(act, claim)
        if isinstance(found, QuotaStatus):
            if found.refused is not None:
                before = [QuotaStatus(budgets=room.budgets) for room in rooms]
                before += [QuotaStatus()] * (position - len(before))
                return combined(claims, [*before, found])
            statuses.append(found)
        else:
            rooms.append(found)
    if statuses:
        # This call repeats an earlier one, which reserved all claims. Return the same statuses.
        return combined(claims, statuses)
    room = min((each.output for each in rooms if each.output is not None), default=None)
    for claim, own in zip(claims, rooms, strict=True):
        output = None if own.output is None else room
        _insert_reservation(act, claim, output)
        statuses.append(replace(_minute(act, claim.account).status(claim, output=output), budgets=own.budgets))
    return combined(claims, statuses)


@dataclass(frozen=True, slots=True)
class BudgetRoom:
    """Remainder of the budgets of an account.

    `output` is the number of output tokens that the budgets permit, or None if no budget limits them. `budgets` are the
    states of the money budgets.
    """

    output: int | None = None
    budgets: tuple[BudgetState, ...] = ()


def _check(act: Transaction, claim: QuotaReservation) -> QuotaStatus | BudgetRoom:
    """Return what remains of the account's budgets for a new claim.

    If the claim is refused, or has been reserved before, return its status instead.
    """
    whose, limits = _account_columns(claim.account), claim.limits
    act.db.execute("DELETE FROM account_claims WHERE tenant = ? AND key = ? AND expires <= ?", (*whose, act.now))
    minute = _minute(act, claim.account)
    row = act.db.execute(
        "SELECT output FROM account_claims WHERE tenant = ? AND key = ? AND once = ?", (*whose, claim.once)
    )
    if (there := row.fetchone()) is not None:
        return minute.status(claim, output=there[0])
    running = 0
    if limits.max_parallel is not None:
        count = "SELECT count(*) FROM account_claims WHERE tenant = ? AND key = ?"
        running = act.db.execute(count, whose).fetchone()[0]
    if (refusal := minute.refusal(claim, running)) is not None:
        return refusal
    if not limits.has_budget and not limits.is_spend_known:
        return BudgetRoom()
    tokens, cost = act.db.execute(
        "SELECT tokens, cost FROM account_spent WHERE tenant = ? AND key = ? AND period = ?", (*whose, claim.period)
    ).fetchone() or (0, 0)
    budgets = budgets_of(claim, cost)
    if not limits.has_budget:
        return BudgetRoom(None, budgets)
    room = _room(act, claim, (tokens, cost))
    if isinstance(room, int):
        return BudgetRoom(room, budgets)
    again = None
    if room is not QuotaKind.BUDGET_RESERVED and claim.period_ends is not None:
        again = max(0.0, claim.period_ends - act.now)
    return replace(minute.status(claim, room, again), budgets=budgets)


def _room(act: Transaction, claim: QuotaReservation, spent: tuple[int, int]) -> int | QuotaKind:
    """Return the number of output tokens that the budgets permit, or the reason for a refusal.

    `spent` contains the tokens and the cost in micro-USD that were spent in the period.
    """
    reserved = act.db.execute(
        "SELECT total(budget_tokens), total(budget_cost) FROM account_claims WHERE tenant = ? AND key = ?",
        _account_columns(claim.account),
    ).fetchone()
    room = _find_room(claim, spent[0] + int(reserved[0]), spent[1] + int(reserved[1]))
    if not isinstance(room, QuotaKind):
        return room
    room_when_idle = _find_room(claim, *spent)
    return room_when_idle if isinstance(room_when_idle, QuotaKind) else QuotaKind.BUDGET_RESERVED


def _find_room(claim: QuotaReservation, used_tokens: int, used_cost: int) -> int | QuotaKind:
    """Return the output tokens that the budgets permit, or the kind of the exhausted budget."""
    limits = claim.limits
    room, owed = claim.max_output, claim.expected_output if claim.is_owed else 0
    if limits.token_budget is not None:
        remaining = limits.token_budget - used_tokens - claim.input
        if remaining < 1 and not claim.is_owed:
            return QuotaKind.TOKEN_BUDGET
        room = min(room, max(claim.expected_output, remaining // SHARE), max(remaining, owed))
    if limits.money_budget is not None:
        remaining = limits.money_budget - used_cost - claim.input_cost
        if (remaining < 0 or used_cost >= limits.money_budget) and not claim.is_owed:
            return QuotaKind.MONEY_BUDGET
        if claim.output_price > 0:
            outputs = max(remaining, 0) * MILLION // claim.output_price
            if outputs < 1 and not claim.is_owed:
                return QuotaKind.MONEY_BUDGET
            room = min(room, max(claim.expected_output, outputs // SHARE), max(outputs, owed))
    return room


def _insert_reservation(act: Transaction, claim: QuotaReservation, room: int | None) -> None:
    second, whose = int(act.now), _account_columns(claim.account)
    _count(act, claim.account, second, claim.requests, claim.tokens)
    # Both costs are rounded up to whole micro-USD, so that no request costs more than was reserved for it.
    cost = 0 if room is None else claim.input_cost - (-room * claim.output_price // MILLION)
    values = (second, claim.tokens, claim.input + (room or 0), cost, room)
    row = (*whose, claim.once, *values, act.now + claim.for_s)
    act.db.execute("INSERT INTO account_claims VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)


def extend(act: Transaction, claims: Sequence[QuotaReservation]) -> None:
    for claim in claims:
        act.db.execute(
            "UPDATE account_claims SET expires = ? WHERE tenant = ? AND key = ? AND once = ? AND expires > ?",
            (act.now + claim.for_s, *_account_columns(claim.account), claim.once, act.now),
        )


def settle(act: Transaction, settlements: Sequence[UsageRecord]) -> None:
    for one in settlements:
        added = _count_new(act, one)
        if one.claim is not None:
            _settle_reservation(act, one.claim, added)


def _count_new(act: Transaction, one: UsageRecord) -> TokenUsage:
    """Write those amounts of a settlement that were not counted before, and return them."""
    entry, owner = one.entry, _account_columns(one.entry.account)
    here = (*owner, one.once)
    expires = act.now + SETTLED_S
    is_new = act.db.execute("INSERT OR IGNORE INTO account_settled VALUES (?, ?, ?, ?)", (*here, expires)).rowcount
    if is_new:
        added = total = entry.used
    else:
        row = act.db.execute(COUNTED, here).fetchone()
        # Without a row, an earlier version has settled this record and counted all its amounts.
        counted = entry.used if row is None else TokenUsage(*row)
        added = entry.used - counted
        total = counted + added
    if any(amounts := _amounts(added)):
        act.db.execute(COUNT, (*here, *_amounts(total), expires))
        if not is_new:
            act.db.execute(EXTEND_MARK, (expires, *here))
        place = (entry.day, *owner, entry.model)
        act.db.execute(ENTER, (*place, *amounts))
        if entry.served:
            act.db.execute(ENTER_SERVED, (*place, entry.served, *amounts))
    return added


def _settle_reservation(act: Transaction, claim: QuotaReservation, used: TokenUsage) -> None:
    """Replace a reservation with the actual usage."""
    whose = _account_columns(claim.account)
    here = (*whose, claim.once)
    row = act.db.execute(
        "SELECT second, tokens FROM account_claims WHERE tenant = ? AND key = ? AND once = ?", here
    ).fetchone()
    if row is not None:
        more = used.tokens - row[1]
        _count(act, claim.account, int(act.now) if more > 0 else row[0], 0, more)
        act.db.execute("DELETE FROM account_claims WHERE tenant = ? AND key = ? AND once = ?", here)
    if not any(_amounts(used)):
        return
    act.db.execute(
        "INSERT INTO account_spent VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens, cost = cost + excluded.cost",
        (*whose, claim.period, used.tokens, used.cost, _sums_expiry(claim.period_ends)),
    )


def raise_spent(act: Transaction, account: Account, period: str, ends: float | None, used: TokenUsage) -> None:
    act.db.execute(
        "INSERT INTO account_spent VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT DO UPDATE SET tokens = max(tokens, excluded.tokens), cost = max(cost, excluded.cost)",
        (*_account_columns(account), period, used.tokens, used.cost, _sums_expiry(ends)),
    )


def _sums_expiry(period_ends: float | None) -> float:
    """Return when the sums of a budget period expire, in seconds since 1970."""
    return FOR_EVER if period_ends is None else period_ends + PAST_PERIOD_S


def ledger(act: Transaction, since: str, until: str, account: Account | None) -> tuple[LedgerLine, ...]:
    totals: dict[tuple[str, Account], dict[str, TokenUsage]] = {}
    for day, tenant, key, model, *amounts in _rows(act, "model", "ledger", since, until):
        totals.setdefault((day, Account(tenant, key)), {})[model] = TokenUsage(*amounts)
    served: dict[tuple[str, Account], dict[tuple[str, str], TokenUsage]] = {}
    for day, tenant, key, model, other, *amounts in _rows(act, "model, served", "ledger_served", since, until):
        served.setdefault((day, Account(tenant, key)), {})[model, other] = TokenUsage(*amounts)
    return tuple(
        entry
        for (day, whose), models in totals.items()
        if account is None or whose == account
        for entry in entries_of(whose, day, models, served.get((day, whose), {}))
    )


def _rows(act: Transaction, models: str, table: str, since: str, until: str) -> list[tuple[Any, ...]]:
    return act.db.execute(
        f"SELECT day, tenant, key, {models}, {COLUMNS} FROM {table} WHERE day BETWEEN ? AND ? "  # noqa: S608
        "ORDER BY day, tenant, key, model",
        (since, until),
    ).fetchall()


def _minute(act: Transaction, account: Account) -> Minute:
    rows = act.db.execute(
        "SELECT second, requests, tokens FROM account_seconds WHERE tenant = ? AND key = ? AND second >= ? "
        "ORDER BY second",
        (*_account_columns(account), int(act.now) - WINDOW_S),
    ).fetchall()
    return Minute(rows, act.now)


def _count(act: Transaction, account: Account, second: int, requests: int, tokens: int) -> None:
    act.db.execute(
        "INSERT INTO account_seconds VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT DO UPDATE SET requests = requests + excluded.requests, tokens = tokens + excluded.tokens",
        (*_account_columns(account), second, requests, tokens, second + WINDOW_S + 2),
    )
