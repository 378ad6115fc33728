"""Errors for requests that exceed a limit or a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from unisono.core.frozen import dataclass
from unisono.core.quotas import QuotaKind, QuotaStatus, owner_of
from unisono.errors import LimitReached, QuotaExceeded, TokensLimited

# Retry delay sent to clients if waiting does not help, in seconds.
NEVER_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Error for a limit that a request exceeds.

    In `message`, `{owner}` is replaced by the kind of the limit's owner, such as `key`. `again_s` is the retry delay in
    seconds that the client gets if the store returns no delay.
    """

    error: type[LimitReached]
    message: str
    again_s: float


REFUSALS: Final[Mapping[QuotaKind, Refusal]] = {
    QuotaKind.REQUESTS: Refusal(
        LimitReached, "This {owner} has reached its limit of requests per minute; try again later.", NEVER_S
    ),
    QuotaKind.TOKENS: Refusal(
        TokensLimited,
        "This request needs more tokens than this {owner} has left of its limit per minute; try again later, or send "
        "a shorter request.",
        NEVER_S,
    ),
    QuotaKind.PARALLEL: Refusal(
        LimitReached,
        "This {owner} has reached its limit of parallel requests; try again when one of them has ended.",
        1.0,
    ),
    QuotaKind.TOKEN_BUDGET: Refusal(QuotaExceeded, "The token budget of this {owner} is spent.", NEVER_S),
    QuotaKind.MONEY_BUDGET: Refusal(QuotaExceeded, "The budget of this {owner} is spent.", NEVER_S),
    QuotaKind.BUDGET_RESERVED: Refusal(
        LimitReached,
        "Running requests have reserved the rest of this {owner}'s budget; try again when they have ended.",
        1.0,
    ),
}


def refused(limit: QuotaKind, status: QuotaStatus) -> LimitReached:
    refusal = REFUSALS[limit]
    again_s = refusal.again_s if status.retry_after_s is None else status.retry_after_s
    owner = "key" if status.account is None else owner_of(status.account)[0]
    # Some clients wait for the reset of the limit, so the reset must not be earlier than the retry. The reset time in
    # `status` is too early if the limit is 0, or if the request exceeds the whole limit.
    if limit is QuotaKind.REQUESTS:
        status = replace(status, requests_reset_s=max(status.requests_reset_s, again_s))
    elif limit is QuotaKind.TOKENS:
        status = replace(status, tokens_reset_s=max(status.tokens_reset_s, again_s))
    return refusal.error(refusal.message.format(owner=owner), retry_after_s=again_s, quota=status)


def no_room(choices: int) -> QuotaExceeded:
    """Return the error for a budget with fewer tokens than the request has choices."""
    return QuotaExceeded(
        f"The remaining budget has no room for an answer with {choices} choices; request fewer choices in 'n'.",
        param="n",
    )
