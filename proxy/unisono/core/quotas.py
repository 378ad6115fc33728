"""Quotas: limits of a key, budget periods, usage, reservations and remaining amounts.

Before a request of a key with limits begins, it reserves quota under all of its limits, or is refused. When the request
ends, the reservation is settled: one atomic operation replaces the reservation with the actual usage and adds the usage
to the ledger. A reservation that is not extended in time lapses. Money is in whole micro-USD, prices are in micro-USD
per million tokens. Times are in seconds of the store's clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Final, Protocol

from unisono.core.budget_period import NO_PERIOD, Period
from unisono.core.frozen import dataclass
from unisono.core.generation import Usage

# Length in seconds of the sliding window for the limits of requests and tokens.
WINDOW_S: Final = 60
# A request without a token limit of its own reserves the remaining budget divided by this number, or its expected usage
# if that is more. The rest of the budget is left for parallel requests.
SHARE: Final = 4
# Micro-USD per USD.
MILLION: Final = 1_000_000


# Tenant of the accounts of shared budgets. No key belongs to this tenant. Usage counted in these accounts is also
# counted in the accounts of keys.
SHARED_TENANT: Final = ""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of a key; None for unlimited.

    `rpm` and `tpm` limit the requests and tokens in any 60 seconds. `max_parallel` limits the number of simultaneous
    requests. `token_budget` (tokens) and `money_budget` (micro-USD) apply to each `budget_period`. The first period
    began at `budget_since`, in seconds since 1970. If usage reaches `soft_budget` (micro-USD), an alert is sent, but no
    request is refused.
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
        """True if any limit is set, including a soft budget.

        A soft budget also needs reservations, because the store adds up the amount spent when they are settled.
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
    def has_any_budget(self) -> bool:
        """True if a budget or a soft budget is set."""
        return self.has_budget or self.soft_budget is not None

    @property
    def is_spend_known(self) -> bool:
        """True if the store reports the amount spent: a money budget or a soft budget is set."""
        return self.money_budget is not None or self.soft_budget is not None


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Account:
    """Account in which usage is counted.

    `key` is the public id of a virtual key of `tenant`, or empty. In the tenant `SHARED_TENANT`, `key` instead contains
    the kind and the id of the owner, separated by a space. A line feed and the generation of the owner may follow; no
    id contains a line feed.
    """

    tenant: str
    key: str = ""


def owner_of(account: Account) -> tuple[str, str]:
    """Return the kind and the id of an account's owner.

    The kind is `key`, `team`, `user`, `gateway` or `provider`.
    """
    if account.tenant != SHARED_TENANT:
        return "key", account.key
    kind, _, name = account.key.partition(" ")
    return kind, name.partition("\n")[0]


class QuotaKind(StrEnum):
    """Limit that caused a request to be refused."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    PARALLEL = "parallel"
    TOKEN_BUDGET = "token_budget"  # noqa: S105 - a budget
    MONEY_BUDGET = "money_budget"
    # The unspent budget would be enough for the request, but running requests have reserved it.
    BUDGET_RESERVED = "budget_reserved"


@dataclass(frozen=True, slots=True)
class QuotaReservation:
    """Reservation for one request.

    `once` is its unique id. `input` is the number of tokens that the request sends. `expected_output` and `max_output`
    are the expected and the largest number of generated tokens. `input_cost` is the cost of the input in micro-USD, and
    `output_price` the price of the output in micro-USD per million tokens. `period` is the name of the current budget
    period. `period_ends` is the start of the next period in seconds since 1970, None for never. The reservation lapses
    after `for_s` seconds unless it is extended. With `is_owed`, it is never refused and not counted under `rpm`,
    because the request was admitted and counted before. With `is_resumed`, the usage includes the usage
    of an earlier reservation, because the request continues an interrupted response.
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
    is_resumed: bool = False

    @property
    def requests(self) -> int:
        """Number of requests that are counted under the limit of requests per minute."""
        return 0 if self.is_owed else 1

    @property
    def tokens(self) -> int:
        """Number of tokens that are reserved under the limit of tokens per minute."""
        return self.input + self.expected_output


@dataclass(frozen=True, slots=True)
class BudgetState:
    """Money budget of an account in its current period.

    All amounts are in micro-USD. `limit` is the budget, and `soft_limit` the soft budget; None if not set. `period` is
    the name of the period, and `period_ends` its end in seconds since 1970, None for never. `spent` does not include
    the reservations of running requests. `has_refused` is True if the last reservation was refused because the
    remaining amount was too small.
    """

    account: Account
    limit: int | None
    spent: int
    period: str = "none"
    soft_limit: int | None = None
    period_ends: float | None = None
    has_refused: bool = False


@dataclass(frozen=True, slots=True)
class QuotaStatus:
    """State of an account after a reservation.

    `refused` is the limit that caused the reservation to be refused, None if the reservation was granted.
    `retry_after_s` is the number of seconds until the same reservation would be granted, None if waiting alone does not
    help. `output` is the largest number of tokens that may be generated, None for no maximum. `requests_left` and
    `tokens_left` are the amounts that remain in the current minute, None if not limited. `requests_reset_s` and
    `tokens_reset_s` are the seconds until the whole limits are available again.
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
    # Account of the reservation. With several reservations, it is the account whose limit refused the request, or None.
    account: Account | None = None
    # Money budgets that were checked.
    budgets: tuple[BudgetState, ...] = ()

    def windows(self) -> Iterator[tuple[str, int, int, float]]:
        """Yield each limit per minute: name, limit, remaining amount, seconds until fully available."""
        for name, limit, remaining, reset_s in (
            ("requests", self.limits.rpm, self.requests_left, self.requests_reset_s),
            ("tokens", self.limits.tpm, self.tokens_left, self.tokens_reset_s),
        ):
            if limit is not None and remaining is not None:
                yield name, limit, remaining, reset_s


def budgets_of(claim: QuotaReservation, spent: int) -> tuple[BudgetState, ...]:
    """Return the state of the claim's money budget and soft budget; empty if it has neither.

    `spent` is the spend of the account in the current budget period, in micro-USD.
    """
    limits, period = claim.limits, claim.period
    if not limits.is_spend_known:
        return ()
    return (BudgetState(claim.account, limits.money_budget, spent, period, limits.soft_budget, claim.period_ends),)


def combined(claims: Sequence[QuotaReservation], statuses: Sequence[QuotaStatus]) -> QuotaStatus:
    """Return one status for all claims of a request: the refusal, or the smallest remainders.

    `statuses` are in the order of `claims`. They end with the first refusal, so later claims have no status.
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
    """Usage of requests; `cached` is part of `input`, and `reasoning` is part of `output`.

    `requests` and `errors` are numbers of requests, `cost` is in micro-USD, and the other fields are numbers of tokens.
    """

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


def charged_input(usage: Usage) -> int:
    """Return the charged input tokens: the first prompt, and the results of server tools."""
    return usage.prompt_tokens + usage.tool_output_tokens


# Names of the fields of `TokenUsage`, in order.
USED: Final = TokenUsage.__slots__
NO_TOKEN_USAGE: Final = TokenUsage()


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """Ledger entry: usage of one model by one account on one UTC day, YYYY-MM-DD.

    `served` is the model that answered instead of the requested `model`; empty if `model` itself answered.
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
    """Usage for the ledger, which replaces the reservation `claim`.

    Amounts are cumulative for each id `once`: the store adds only the difference from the amounts that it added for
    this id before. Repeating a settlement therefore adds nothing.
    """

    once: str
    entry: LedgerLine
    claim: QuotaReservation | None = None


def entries_of(
    account: Account, day: str, totals: Mapping[str, TokenUsage], served: Mapping[tuple[str, str], TokenUsage]
) -> Iterator[LedgerLine]:
    """Yield the ledger entries of one account and day.

    `totals` is the usage by requested model, no matter which model answered; earlier versions of Unisono stored only
    `totals`. `served` is the part of this usage for which a different model answered, by requested and served model.
    """
    for model in sorted(totals):
        others = {other: used for (requested, other), used in sorted(served.items()) if requested == model}
        own = totals[model] - sum(others.values(), NO_TOKEN_USAGE)
        if own != NO_TOKEN_USAGE:
            yield LedgerLine(account, model, day, own)
        for other, used in others.items():
            yield LedgerLine(account, model, day, used, other)


class QuotaObserver(Protocol):
    """Observer of quotas. Both methods return immediately and raise no exception."""

    def budget_changed(self, budget: BudgetState) -> None:
        """Receive the new state of a budget, after a reservation or a settlement."""
        ...

    def quota_refused(self, limit: QuotaKind, account: Account) -> None: ...


class AccountStore(Protocol):
    """Storage for accounts. Every method may raise `StoreUnavailable`."""

    async def reserve(self, claim: QuotaReservation, *others: QuotaReservation) -> QuotaStatus:
        """Reserve all claims of one request, or none of them if one claim is refused.

        Each claim is for a different account. A claim that is already reserved is not reserved a second time.
        """
        ...

    async def extend(self, *claims: QuotaReservation) -> None:
        """Extend claims to `for_s` seconds from now; lapsed claims stay lapsed."""
        ...

    async def settle(self, *settlements: UsageRecord) -> None:
        """Replace each claim with the actual usage, and add it to the ledger in the same operation."""
        ...

    async def raise_spent(self, account: Account, period: str, ends: float | None, used: TokenUsage) -> None:
        """Raise the tokens and the cost spent in a budget period to at least those in `used`.

        `period` and `ends` have the meaning of `period` and `period_ends` in `QuotaReservation`.
        """
        ...

    async def ledger(self, since: str, until: str, account: Account | None = None) -> tuple[LedgerLine, ...]:
        """Return the entries of the days `since` to `until`, inclusive, of one account or of all.

        Days are YYYY-MM-DD in UTC. The entries are ordered by day, account and model.
        """
        ...
