"""Limits other than budgets, counted by this process alone while the store is down.

Claims that the store granted before are counted too, so that the limits per minute do not start anew with an outage.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from unisono.core.key_rate_limits import Minute
from unisono.core.lru_cache import RecentEntries
from unisono.core.quotas import WINDOW_S, Account, QuotaReservation, QuotaStatus, combined

# Maximum number of accounts. If there are more, the least recently used one is dropped.
MAX_ACCOUNTS: Final = 4096


@dataclass(slots=True)
class _Counts:
    """Counts of one account.

    `seconds` has the number of requests and of tokens in each second. `running` has the second and the reserved tokens
    of each claim that is not settled yet.
    """

    seconds: OrderedDict[int, tuple[int, int]] = field(default_factory=OrderedDict)
    running: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, second: int, requests: int, tokens: int) -> None:
        before = self.seconds.get(second, (0, 0))
        self.seconds[second] = before[0] + requests, before[1] + tokens

    def minute(self, now: float) -> Minute:
        while self.seconds and (oldest := next(iter(self.seconds))) < int(now) - WINDOW_S:
            del self.seconds[oldest]
        return Minute([(second, *amounts) for second, amounts in self.seconds.items()], now)


class OutageLimits:
    """Rate limits that this process counts, for use while the store is down.

    `clock` returns seconds of a clock that never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: RecentEntries[Account, _Counts] = RecentEntries(MAX_ACCOUNTS)

    def reserve(self, *claims: QuotaReservation) -> QuotaStatus:
        """Reserve all claims, or refuse all of them in the same way as a store.

        No claim may have a budget.
        """
        now, statuses = self._clock(), []
        for claim in claims:
            counts = self._counts(claim.account)
            minute = counts.minute(now)
            refusal = minute.refusal(claim, len(counts.running))
            statuses.append(refusal or minute.status(claim))
            if refusal is not None:
                return combined(claims, statuses)
        for claim in claims:
            self._count(self._counts(claim.account), claim, now)
        return combined(claims, [self._counts(claim.account).minute(now).status(claim) for claim in claims])

    def note(self, claim: QuotaReservation) -> None:
        """Count a claim that the store granted, so that it is included if the store fails."""
        self._count(self._counts(claim.account), claim, self._clock())

    def settle(self, claim: QuotaReservation, tokens: int) -> None:
        """Replace the tokens that `claim` reserved with `tokens`, its actual usage.

        An unknown claim is ignored.
        """
        counts = self._accounts.get(claim.account)
        if counts is None or (reserved_at := counts.running.pop(claim.once, None)) is None:
            return
        second, now = reserved_at[0], self._clock()
        more = tokens - reserved_at[1]
        if more > 0:
            counts.add(int(now), 0, more)
        elif second in counts.seconds:
            counts.add(second, 0, more)

    def _count(self, counts: _Counts, claim: QuotaReservation, now: float) -> None:
        counts.minute(now)
        if claim.once not in counts.running:
            counts.add(int(now), claim.requests, claim.tokens)
            counts.running[claim.once] = int(now), claim.tokens

    def _counts(self, account: Account) -> _Counts:
        counts = self._accounts.get(account) or _Counts()
        self._accounts.put(account, counts)
        return counts
