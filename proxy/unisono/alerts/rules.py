"""Rules for alerts about budgets, backends and the store.

Event names, and the fields of budget alerts, are the same as in LiteLLM's webhook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Final, Protocol

from unisono.core.alerts import Alert, AlertSink
from unisono.core.conversation import Json
from unisono.core.lru_cache import RecentEntries
from unisono.core.quotas import MILLION, Account, BudgetState, QuotaKind, owner_of

# Maximum number of budgets for which the reached threshold is stored, to prevent repeated alerts.
MAX_BUDGETS: Final = 10_000
# States of a deployment that is not considered down. A quarantine causes its own alerts.
UP: Final = frozenset({"ready", "quarantined", "shadow"})
# Field that contains the id of a budget's owner, by kind of owner.
OWNER_FIELDS: Final = {"key": "token", "team": "team_id", "user": "user_id", "customer": "customer_id"}


class BudgetAlerts:
    """Observer of quotas that alerts about spent budgets.

    It sends an alert when spending reaches one of `thresholds`, which are fractions of the budget, and when a soft
    budget is spent. If `thresholds` contains 1, it also sends an alert when a budget refuses a request although it is
    not spent, because its remaining amount is too small for the request.
    """

    def __init__(self, thresholds: Sequence[float], sink: AlertSink) -> None:
        self._thresholds = sorted(thresholds)
        self._sink = sink
        # Highest threshold that was reached, by account, period, amount and event. After a change of the amount,
        # alerts about the new thresholds are sent.
        self._reached: RecentEntries[tuple[Account, str, int, str], float] = RecentEntries(MAX_BUDGETS)

    def budget_changed(self, budget: BudgetState) -> None:
        if (limit := budget.limit) is not None:
            reached = max((each for each in self._thresholds if budget.spent >= each * limit), default=0.0)
            if reached and self._is_new(budget, limit, reached, "budget"):
                self._sink(budget_alert(budget, reached))
            # If the remaining amount is too small for any request, the budget is never spent.
            is_refusal = budget.has_refused and budget.spent < limit and 1 in self._thresholds
            if is_refusal and self._is_new(budget, limit, 1.0, "refusal"):
                self._sink(refusal_alert(budget))
        # A soft budget of 0 is reached by the first cost.
        soft = budget.soft_limit
        if soft is not None and budget.spent >= max(soft, 1) and self._is_new(budget, soft, 1.0, "soft_budget"):
            self._sink(soft_budget_alert(budget, soft))

    def _is_new(self, budget: BudgetState, limit: int, reached: float, event: str) -> bool:
        """Record a reached threshold. Return False if it is not above those recorded before."""
        place = (budget.account, budget.period, limit, event)
        if reached <= self._reached.get(place, 0.0):
            return False
        self._reached.put(place, reached)
        return True

    def quota_refused(self, limit: QuotaKind, account: Account) -> None:
        """Do nothing: `budget_changed` also receives budgets that refuse requests."""


def budget_alert(budget: BudgetState, threshold: float) -> Alert:
    """Return the alert for a budget that has reached a threshold."""
    kind, name = owner_of(budget.account)
    spent, limit = budget.spent / MILLION, (budget.limit or 0) / MILLION
    owner = " ".join(filter(None, (kind, name)))
    facts = {**_budget_facts(budget), "threshold": threshold}
    return Alert(
        id=_id("budget", budget, f"{budget.limit} {threshold:g}"),
        event="budget_crossed" if threshold >= 1 else "threshold_crossed",
        group=kind,
        message=f"The budget of {owner} is {threshold:.0%} spent: {spent:.4f} of {limit:.4f} dollars.",
        facts=facts,
        once_until=_end_of(budget),
    )


def refusal_alert(budget: BudgetState) -> Alert:
    """Return the alert for a budget that refused a request before it was spent completely."""
    kind, name = owner_of(budget.account)
    spent, limit = budget.spent / MILLION, (budget.limit or 0) / MILLION
    owner = " ".join(filter(None, (kind, name)))
    return Alert(
        id=_id("budget_refusal", budget, str(budget.limit)),
        event="budget_crossed",
        group=kind,
        message=f"The budget of {owner} has refused a request: the remaining amount is too small. "
        f"{spent:.4f} of {limit:.4f} dollars are spent.",
        facts={**_budget_facts(budget), "threshold": 1.0},
        once_until=_end_of(budget),
    )


def soft_budget_alert(budget: BudgetState, soft: int) -> Alert:
    """Return the alert for a soft budget that is spent."""
    kind, name = owner_of(budget.account)
    spent, limit = budget.spent / MILLION, soft / MILLION
    owner = " ".join(filter(None, (kind, name)))
    return Alert(
        id=_id("soft_budget", budget, str(soft)),
        event="soft_budget_crossed",
        group=kind,
        message=f"The soft budget of {owner} is spent: {spent:.4f} of {limit:.4f} dollars. Requests are still served.",
        facts=_budget_facts(budget),
        once_until=_end_of(budget),
    )


def _end_of(budget: BudgetState) -> float:
    """Return the Unix time at which the budget's period ends; infinity if it never ends."""
    return inf if budget.period_ends is None else budget.period_ends


def _id(event: str, budget: BudgetState, limit: str) -> str:
    """Return the id of an alert.

    It contains the generation of the owner, so that an owner with the id of a deleted one has alerts of its own.
    """
    kind, name = owner_of(budget.account)
    generation = budget.account.key.partition("\n")[2]
    parts = (event, kind, budget.account.tenant, name, budget.period, limit, generation)
    return " ".join(parts if generation else parts[:-1])


def _budget_facts(budget: BudgetState) -> dict[str, Json]:
    kind, name = owner_of(budget.account)
    facts: dict[str, Json] = {"spend": budget.spent / MILLION, "period": budget.period}
    for field, limit in (("max_budget", budget.limit), ("soft_budget", budget.soft_limit)):
        if limit is not None:
            facts[field] = limit / MILLION
    if kind in OWNER_FIELDS:
        facts[OWNER_FIELDS[kind]] = name
    return facts


class DeploymentState(Protocol):
    """State of a deployment at one moment (`routing.status.DeploymentStatus`)."""

    @property
    def model(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...


class HealthAlerts:
    """Alerts about deployments and the store: when they fail, and when they work again.

    A failure causes an alert once it has lasted `after_s` seconds. `clock` returns seconds.
    """

    def __init__(self, after_s: float, sink: AlertSink, clock: Callable[[], float]) -> None:
        self._after_s = after_s
        self._sink = sink
        self._clock = clock
        self._down_since: dict[str, float] = {}
        self._alerted: set[str] = set()

    def check(self, deployments: Iterable[DeploymentState], *, store_works: bool) -> None:
        """Compare the current states with earlier states, and send alerts about changes."""
        states = {f"backend {each.name} of {each.model}": each.state in UP for each in deployments}
        states["store"] = store_works
        for subject, is_up in states.items():
            self._check(subject, is_up=is_up)
        # Deployments that a reload removed cause no alert.
        for gone in self._down_since.keys() - states.keys():
            del self._down_since[gone]
        self._alerted &= states.keys()

    def _check(self, subject: str, *, is_up: bool) -> None:
        now = self._clock()
        if is_up:
            self._down_since.pop(subject, None)
            if subject in self._alerted:
                self._alerted.remove(subject)
                self._send(subject, "up", "works again")
        elif now - self._down_since.setdefault(subject, now) >= self._after_s and subject not in self._alerted:
            self._alerted.add(subject)
            self._send(subject, "down", f"has not worked for {self._after_s:g} seconds")

    def _send(self, subject: str, state: str, text: str) -> None:
        group = subject.partition(" ")[0]
        alert = Alert(
            id=f"{group}_{state} {subject}",
            event=f"{group}_{state}",
            group=group,
            message=f"The {subject} {text}.",
            facts={"subject": subject},
        )
        self._sink(alert)
