"""Last known state of budgets, for metrics and alerts.

The state of a budget is the last one that the store returned, plus the costs that this process has settled since then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from unisono.core.lru_cache import RecentEntries
from unisono.core.quotas import Account, BudgetState, QuotaKind, QuotaObserver, QuotaStatus, UsageRecord

# Maximum number of budgets whose state is remembered. If there are more, the least recently changed one is dropped.
MAX_BUDGETS: Final = 10_000


class BudgetWatch:
    """Reporter of budget changes and refused requests to `observers`."""

    def __init__(self, observers: Sequence[QuotaObserver] = ()) -> None:
        self._observers = tuple(observers)
        self._budgets: RecentEntries[tuple[Account, str], BudgetState] = RecentEntries(MAX_BUDGETS)

    def reserved(self, status: QuotaStatus) -> None:
        """Report the budgets in the status of a reservation."""
        if not self._observers:
            return
        is_spent = status.refused is QuotaKind.MONEY_BUDGET
        for budget in status.budgets:
            self._report(replace(budget, has_refused=True) if is_spent and budget.account == status.account else budget)

    def refused(self, status: QuotaStatus) -> None:
        """Report that a request was refused because its reservation has this status."""
        if status.refused is not None and status.account is not None:
            for observer in self._observers:
                observer.quota_refused(status.refused, status.account)

    def settled(self, settlement: UsageRecord) -> None:
        """Report the cost of a settled request.

        A settlement of a resumed response is ignored, because its amounts include amounts that were settled before the
        response was interrupted.
        """
        claim, cost = settlement.claim, settlement.entry.used.cost
        if claim is None or claim.is_resumed or not cost or not self._observers:
            return
        known = self._budgets.get((claim.account, claim.period))
        if known is not None:
            self._report(replace(known, spent=known.spent + cost))

    def _report(self, budget: BudgetState) -> None:
        place = (budget.account, budget.period)
        if self._budgets.get(place) == budget:
            return
        self._budgets.put(place, budget)
        for observer in self._observers:
            observer.budget_changed(budget)
