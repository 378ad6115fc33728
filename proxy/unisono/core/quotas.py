"""Quotas: limits of a key, budget periods, usage, reservations and remaining amounts.

A request of a key with limits reserves quota before it begins, all or nothing, and is settled once when it ends. A
reservation that is not renewed lapses. Settling enters the usage in the ledger in the same atomic operation. Money is
in whole micro-USD, prices in micro-USD per million tokens. Times are the store's, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Final, Protocol

from unisono.core.budget_period import NO_PERIOD, Period
from unisono.core.frozen import dataclass

# Length of the sliding window for the limits of requests and tokens.
WINDOW_S: Final = 60
# Divisor of the remaining budget for a request without its own token limit. Such a request reserves this fraction or
# its expected usage, whichever is more, so that parallel requests find budget too.
SHARE: Final = 4
# Micro-USD per USD.
MILLION: Final = 1_000_000


# Tenant of budgets that several keys share. No key belongs to it, and its usage is part of the usage of keys.
SHARED_TENANT: Final = ""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of a key; None for unlimited.

    `rpm` and `tpm` limit requests and tokens in any 60 seconds, `max_parallel` simultaneous requests. `token_budget`
    (tokens) and `money_budget` (micro-USD) apply to each `budget_period`. The first period began at `budget_since`, in
    seconds since 1970. `soft_budget` (micro-USD) refuses nothing: reaching it causes an alert.
    """

    rpm: int | None = None
    tpm: int | None = None
    max_parallel: int | None = None
    token_budget: int | None = None
    money_budget: int | None = None
    budget_period: Period = NO_PERIOD
    budget_since: float = 0.0
    soft_budget: int | None = None

    @property
    def limited(self) -> bool:
        """True if any limit is set.

        A soft budget counts, because the store sums what reservations spend.
        """
        return (
            self.rpm is not None
            or self.tpm is not None
            or self.max_parallel is not None
            or self.token_budget is not None
            or self.money_budget is not None
            or self.soft_budget is not None
        )

    @property
    def has_budget(self) -> bool:
        """True if a budget may refuse a request."""
        return self.token_budget is not None or self.money_budget is not None

    @property
    def is_spend_known(self) -> bool:
        """True if the state of a reservation has the amount that is spent."""
        return self.money_budget is not None or self.soft_budget is not None


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Account:
    """Account: a tenant and a virtual key by its public id, empty if there is no key."""

    tenant: str
    key: str = ""


def owner_of(account: Account) -> tuple[str, str]:
    """Return the kind and the id of an account's owner.

    Kinds: `key`, `team`, `user`, `gateway` and `provider`.
    """
    if account.tenant != SHARED_TENANT:
        return "key", account.key
    kind, _, name = account.key.partition(" ")
    return kind, name


class QuotaKind(StrEnum):
    """Limit that refused a request."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    PARALLEL = "parallel"
    TOKEN_BUDGET = "token_budget"  # noqa: S105 - a budget
    MONEY_BUDGET = "money_budget"
    # A budget has room for the request, but running requests have reserved it.
    BUDGET_RESERVED = "budget_reserved"


@dataclass(frozen=True, slots=True)
class QuotaReservation:
    """Reservation for one request.

    `once` is its unique id. `input` counts the tokens it sends. `expected_output` are the tokens it is expected to
    generate, `max_output` the maximum. `input_cost` and `output_price` give their cost. `period` names the budget's
    period. `period_ends` is the start of the next period in seconds since 1970, None for never. The reservation lasts
    `for_s` seconds unless it is renewed. A reservation with `is_owed` is never refused, because its request was
    admitted before.
    """

    account: Account
    once: str
    limits: KeyLimits
    input: int
    expected_output: int
    max_output: int
    for_s: float
    input_cost: int = 0
    output_price: int = 0
    period: str = "none"
    period_ends: float | None = None
    is_owed: bool = False

    @property
    def tokens(self) -> int:
        """Tokens reserved in the window of a minute."""
        return self.input + self.expected_output


@dataclass(frozen=True, slots=True)
class BudgetState:
    """Money budget of an account in its current period.

    All amounts are in micro-USD. `limit` and `soft_limit` are the budget and the soft budget, None without one.
    `period` is the name of the period. Reservations of running requests are not spent.
    """

    account: Account
    limit: int | None
    spent: int
    period: str = "none"
    soft_limit: int | None = None


@dataclass(frozen=True, slots=True)
class QuotaStatus:
    """State of an account after a reservation.

    `refused` is the limit that refused it, None if it was granted. `retry_after_s` is the number of seconds until it
    would be granted, None if waiting alone does not help. Remaining amounts are None without a limit.
    `requests_reset_s` and `tokens_reset_s` are the seconds until they are full again. `output` is the number of tokens
    that may be generated, None for any.
    """

    refused: QuotaKind | None = None
    retry_after_s: float | None = None
    output: int | None = None
    requests_left: int | None = None
    requests_reset_s: float = 0.0
    tokens_left: int | None = None
    tokens_reset_s: float = 0.0
    # Limits of the account.
    limits: KeyLimits = NO_LIMITS
    # Account of the claim; None for several claims, unless the limit of one of them refused the request.
    account: Account | None = None
    # Money budgets that were checked.
    budgets: tuple[BudgetState, ...] = ()

    def windows(self) -> Iterator[tuple[str, int, int, float]]:
        """Yield each limit per minute: name, limit, remaining amount, seconds until full again."""
        for name, limit, remaining, reset_s in (
            ("requests", self.limits.rpm, self.requests_left, self.requests_reset_s),
            ("tokens", self.limits.tpm, self.tokens_left, self.tokens_reset_s),
        ):
            if limit is not None and remaining is not None:
                yield name, limit, remaining, reset_s


def budgets_of(claim: QuotaReservation, spent: int) -> tuple[BudgetState, ...]:
    """Return the state of the money budget of a claim, if it has one."""
    limits = claim.limits
    if not limits.is_spend_known:
        return ()
    return (BudgetState(claim.account, limits.money_budget, spent, claim.period, limits.soft_budget),)


def combined(claims: Sequence[QuotaReservation], statuses: Sequence[QuotaStatus]) -> QuotaStatus:
    """Return the status of joint claims: the refusal, or the least of what remains.

    A refusal is the last status; later claims have none.
    """
    if len(claims) == 1:
        return statuses[0]
    last = statuses[-1]
    budgets = tuple(budget for status in statuses for budget in status.budgets)
    if last.refused is not None:
        return replace(last, budgets=budgets)
    outputs = [status.output for status in statuses if status.output is not None]
    both = list(zip(claims, statuses, strict=False))
    requests = min((each for each in both if each[1].requests_left is not None), key=_requests_left, default=both[0])
    tokens = min((each for each in both if each[1].tokens_left is not None), key=_tokens_left, default=both[0])
    return QuotaStatus(
        output=min(outputs, default=None),
        requests_left=requests[1].requests_left,
        requests_reset_s=requests[1].requests_reset_s,
        tokens_left=tokens[1].tokens_left,
        tokens_reset_s=tokens[1].tokens_reset_s,
        limits=replace(claims[0].limits, rpm=requests[0].limits.rpm, tpm=tokens[0].limits.tpm),
        budgets=budgets,
    )


def _requests_left(each: tuple[QuotaReservation, QuotaStatus]) -> int:
    return each[1].requests_left or 0


def _tokens_left(each: tuple[QuotaReservation, QuotaStatus]) -> int:
    return each[1].tokens_left or 0


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Usage of requests: `cached` is part of `input`, `reasoning` of `output`."""

    requests: int = 0
    errors: int = 0
    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0
    cost: int = 0

    @property
    def tokens(self) -> int:
        return self.input + self.output

    def __sub__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            max(self.requests - other.requests, 0),
            max(self.errors - other.errors, 0),
            max(self.input - other.input, 0),
            max(self.cached - other.cached, 0),
            max(self.output - other.output, 0),
            max(self.reasoning - other.reasoning, 0),
            max(self.cost - other.cost, 0),
        )

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.requests + other.requests,
            self.errors + other.errors,
            self.input + other.input,
            self.cached + other.cached,
            self.output + other.output,
            self.reasoning + other.reasoning,
            self.cost + other.cost,
        )


# Names of the counted amounts, in order.
USED: Final = TokenUsage.__slots__
NO_TOKEN_USAGE: Final = TokenUsage()


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """Ledger entry: usage of one model by one account on one UTC day, YYYY-MM-DD.

    `served` is the model that answered instead of `model`; empty if `model` itself did.
    """

    account: Account
    model: str
    day: str
    used: TokenUsage
    served: str = ""

    @property
    def served_model(self) -> str:
        return self.served or self.model


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """Usage for the ledger, replacing the reservation `claim`.

    Amounts are cumulative for each `once`: the store counts only the excess over the amounts it counted for that id
    before. Repeating a settlement counts nothing.
    """

    once: str
    entry: LedgerLine
    claim: QuotaReservation | None = None


def entries_of(
    account: Account, day: str, totals: Mapping[str, TokenUsage], served: Mapping[tuple[str, str], TokenUsage]
) -> Iterator[LedgerLine]:
    """Yield the ledger entries of one account and day.

    `totals` are by requested model, whichever model answered; earlier versions know only these. `served` is the part
    of them that other models answered, by requested and served model.
    """
    for model in sorted(totals):
        others = {other: used for (requested, other), used in sorted(served.items()) if requested == model}
        own = totals[model] - sum(others.values(), NO_TOKEN_USAGE)
        if own != NO_TOKEN_USAGE:
            yield LedgerLine(account, model, day, own)
        for other, used in others.items():
            yield LedgerLine(account, model, day, used, other)


class QuotaObserver(Protocol):
    """Observer of quotas. Both methods return at once and do not raise."""

    def budget_changed(self, budget: BudgetState) -> None:
        """Receive the state of a budget, after a reservation or a settlement."""
        ...

    def quota_refused(self, limit: QuotaKind, account: Account) -> None: ...


class AccountStore(Protocol):
    """Storage for accounts. Every method may raise `StoreUnavailable`."""

    async def reserve(self, claim: QuotaReservation, *others: QuotaReservation) -> QuotaStatus:
        """Reserve what all claims of one request ask for, or nothing if one of them is refused.

        Each claim is for a different account. Claims that are already reserved are not reserved a second time.
        """
        ...

    async def extend(self, *claims: QuotaReservation) -> None:
        """Extend claims to `for_s` seconds from now; lapsed claims stay lapsed."""
        ...

    async def settle(self, *settlements: UsageRecord) -> None:
        """Replace each claim by the actual usage and enter it in the ledger, each in one operation."""
        ...

    async def ledger(self, since: str, until: str, account: Account | None = None) -> tuple[LedgerLine, ...]:
        """Return the entries of the days `since` to `until`, inclusive, of one account or of all.

        They are ordered by day, account and model.
        """
        ...
