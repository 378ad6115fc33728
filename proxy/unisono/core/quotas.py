"""Accounts: what a key has used, what is held for turns that run, and what it may still use.

A turn of a key with limits reserves before it begins, all or nothing, and is settled once when it ends; a reservation
that is not renewed lapses. Whatever was used is entered in the ledger by the same act that settles. Money is in whole
micro-USD, prices in micro-USD for a million tokens; times are the store's, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from unisono.core.access import NO_LIMITS, KeyLimits

WINDOW_S: Final = 60
"""In any so many seconds a key makes no more requests and takes no more tokens than it may."""
SHARE: Final = 4
"""A turn that names no bound of its own holds one part in so many of what is left of a budget, or what it is expected
to need where that is more: the turns beside it find something too."""
MILLION: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Account:
    """Who something is counted for: a virtual key by its public id, empty for what needs none, and its tenant."""

    tenant: str
    key: str = ""


class QuotaKind(StrEnum):
    """What a turn was refused by."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    PARALLEL = "parallel"
    TOKEN_BUDGET = "token_budget"  # noqa: S105 - a budget
    MONEY_BUDGET = "money_budget"


@dataclass(frozen=True, slots=True)
class QuotaReservation:
    """What a turn wants of its account. `once` is its own and nobody else's. `input` are the tokens it sends, `least`
    those it is expected to generate and `most` those it could; `input_cost` and `output_price` say what they cost.
    `period` names the budget's period and `period_ends` is when the next one begins, None for never, in seconds since
    1970. The claim is held for `for_s` seconds unless it is renewed. One that is `owed` is never refused: what it is
    for was let in before."""

    account: Account
    once: str
    limits: KeyLimits
    input: int
    least: int
    most: int
    for_s: float
    input_cost: int = 0
    output_price: int = 0
    period: str = "none"
    period_ends: float | None = None
    owed: bool = False

    @property
    def tokens(self) -> int:
        """What is held of the tokens of a minute."""
        return self.input + self.least


@dataclass(frozen=True, slots=True)
class QuotaStatus:
    """How an account stands behind a claim. `refused` is the limit that it met, None when it was granted, and
    `again_s` when there is room for it, None for never by itself. What is left is None where there is no limit;
    `requests_reset_s` and `tokens_reset_s` is when all of it is there again. `output` are the tokens that may be
    generated, None for any number."""

    refused: QuotaKind | None = None
    again_s: float | None = None
    output: int | None = None
    requests_left: int | None = None
    requests_reset_s: float = 0.0
    tokens_left: int | None = None
    tokens_reset_s: float = 0.0
    limits: KeyLimits = NO_LIMITS
    """What the account may use; the store does not say it."""

    def windows(self) -> Iterator[tuple[str, int, int, float]]:
        """What of a minute is limited: its name, how much may be used, how much is left, and in how many seconds all of
        it is there again."""
        for name, limit, left, reset_s in (
            ("requests", self.limits.rpm, self.requests_left, self.requests_reset_s),
            ("tokens", self.limits.tpm, self.tokens_left, self.tokens_reset_s),
        ):
            if limit is not None and left is not None:
                yield name, limit, left, reset_s


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """What turns took: `cached` is part of `input`, `reasoning` of `output`."""

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
        return TokenUsage(*(max(getattr(self, name) - getattr(other, name), 0) for name in USED))

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(*(getattr(self, name) + getattr(other, name) for name in USED))


USED: Final = TokenUsage.__slots__
"""The names of what is counted, in their order."""


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """A line of the ledger: what one account took of one model on one day of UTC, YYYY-MM-DD. `served` is the model
    that answered in place of `model`; empty where `model` itself did."""

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
    """Usage for the ledger, in place of what `claim` reserves. Amounts are cumulative for each `once`: the store counts
    only what exceeds the amounts that it counted for that id before. Repeating a settlement counts nothing."""

    once: str
    entry: LedgerLine
    claim: QuotaReservation | None = None


def entries_of(
    account: Account, day: str, totals: Mapping[str, TokenUsage], served: Mapping[tuple[str, str], TokenUsage]
) -> Iterator[LedgerLine]:
    """Lines of one account and day. `totals` are by requested model, whichever model answered: earlier versions know
    nothing else. `served` is the part of them that other models answered, by requested and served model."""
    for model in sorted(totals):
        others = {other: used for (requested, other), used in sorted(served.items()) if requested == model}
        own = totals[model] - sum(others.values(), TokenUsage())
        if own != TokenUsage():
            yield LedgerLine(account, model, day, own)
        for other, used in others.items():
            yield LedgerLine(account, model, day, used, other)


class AccountStore(Protocol):
    """Where accounts are kept; `StoreUnavailable` may come of each."""

    async def reserve(self, claim: QuotaReservation) -> QuotaStatus:
        """Hold what a claim wants, all of it or nothing. The same claim again is held once."""
        ...

    async def extend(self, *claims: QuotaReservation) -> None:
        """Hold claims for another `for_s` seconds from now; those that have lapsed are gone."""
        ...

    async def settle(self, *settlements: UsageRecord) -> None:
        """Each in one act: the truth in place of what was held, and its entry in the ledger."""
        ...

    async def ledger(self, since: str, until: str, account: Account | None = None) -> tuple[LedgerLine, ...]:
        """The entries of days from `since` to `until`, both of them too, of one account or of all, by day, account and
        model."""
        ...
