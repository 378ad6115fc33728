"""Metrics of spend, budgets, refusals, keys and teams.

Keys and teams are created at run time, so their label values are bounded: those beyond a maximum are counted as
`other`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from unisono.core.observer import GenerationDone
from unisono.core.quotas import MILLION, Account, BudgetState, QuotaKind, charged_input, owner_of
from unisono.core.request_record import RequestRecord
from unisono.observe.metric_definitions import Instruments

# Label for values that are in no table and not in the configuration, and for values beyond a maximum number.
OTHER: Final = "other"
# Maximum number of reasons for rejections. Hooks may define codes of their own.
MAX_REASONS: Final = 100
# Owners of budgets whose names are in the configuration.
CONFIGURED_OWNERS: Final = frozenset({"gateway", "provider"})
CLIENT_LEFT: Final = 499


class BoundedLabel:
    """Label with at most `most` values besides the empty one.

    The first `most` values are used as they are; all later values become `other`.
    """

    def __init__(self, most: int) -> None:
        self.max_values = most
        self._values: set[str] = set()

    def __call__(self, value: str) -> str:
        if value and value not in self._values:
            if len(self._values) >= self.max_values:
                return OTHER
            self._values.add(value)
        return value


class OwnerMetrics:
    """Counters of spend and refusals, and gauges of budgets; also an observer of quotas.

    If `is_per_key` is True, keys, teams and users have metrics of their own.
    """

    def __init__(self, instruments: Instruments, model_label: Callable[[str], str]) -> None:
        self._all = instruments
        self._model_label = model_label
        self._reason = BoundedLabel(MAX_REASONS)
        self.is_per_key = False
        self.limit_labels(0)

    def limit_labels(self, most: int) -> None:
        """Count at most `most` keys, `most` teams and `most` users by name, and all others together."""
        self._key, self._team, self._user = BoundedLabel(most), BoundedLabel(most), BoundedLabel(most)

    def ended(self, done: GenerationDone) -> None:
        """Count the cost of a generation."""
        dollars = done.cost / MILLION
        if dollars:
            self._all.spend.series[self._model_label(done.start.model)].inc(dollars)
        if self.is_per_key:
            labels = self._key_and_team(done.start.key, done.start.tenant)
            if dollars:
                self._all.key_spend.series[labels].inc(dollars)
            usage = done.charged_usage
            self._all.key_tokens.series[labels[0], "prompt"].inc(charged_input(usage))
            self._all.key_tokens.series[labels[0], "generation"].inc(usage.completion_tokens)

    def answered(self, record: RequestRecord) -> None:
        """Count one HTTP request."""
        # An error status without an error code is not a refusal, such as 503 of the readiness check during startup.
        is_error = record.status >= 400 and record.error != ""
        if is_error and record.status != CLIENT_LEFT and not record.attempts:
            self._all.refusals.series[self._reason(record.error)].inc()
        if self.is_per_key and record.tenant:
            self._all.key_requests.series[*self._key_and_team(record.key, record.tenant), outcome_of(record)].inc()

    def _key_and_team(self, key: str, tenant: str) -> tuple[str, str]:
        # A key without a team has a tenant of its own.
        return self._key(key), self._team(tenant) if key and tenant != key else ""

    # -- quotas

    def budget_changed(self, budget: BudgetState) -> None:
        kind, name = owner_of(budget.account)
        if kind not in CONFIGURED_OWNERS:
            if not self.is_per_key:
                return
            name = {"key": self._key, "team": self._team}.get(kind, self._user)(name)
            # Gauges of several owners with the label `other` would overwrite each other.
            if name == OTHER:
                return
        if budget.limit is not None:
            self._all.budget_limit.series[kind, name].set(budget.limit / MILLION)
            self._all.budget_left.series[kind, name].set((budget.limit - budget.spent) / MILLION)
        if budget.soft_limit is not None:
            self._all.soft_budget_left.series[kind, name].set((budget.soft_limit - budget.spent) / MILLION)

    def quota_refused(self, limit: QuotaKind, account: Account) -> None:
        self._all.quota_refusals.series[limit.value, owner_of(account)[0]].inc()


def outcome_of(record: RequestRecord) -> str:
    """Return the outcome of a request: `ok`, `refused`, `failed`, or `left`.

    `left` means that the client disconnected.
    """
    if record.status == CLIENT_LEFT:
        return "left"
    if 400 <= record.status < 500:
        return "refused"
    return "failed" if record.status >= 500 or record.error else "ok"
