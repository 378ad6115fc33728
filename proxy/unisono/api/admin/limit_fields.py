"""Limits of keys, teams, users and budgets: the fields of requests and of answers."""

from __future__ import annotations

from dataclasses import replace
from datetime import tzinfo
from typing import Any, Final

from unisono.api.admin.fields import UNIT_SECONDS, AdminBody, Amount, PeriodText, Usd, iso, period_of
from unisono.core.budget_period import Period
from unisono.core.conversation import Json
from unisono.core.quotas import MILLION, KeyLimits


class LimitFields(AdminBody):
    """Limits of a key, a team, a user or a named budget.

    All fields except `token_budget` are LiteLLM's.
    """

    max_budget: Usd | None = None
    soft_budget: Usd | None = None
    budget_duration: PeriodText | None = None
    max_parallel_requests: Amount | None = None
    tpm_limit: Amount | None = None
    rpm_limit: Amount | None = None
    token_budget: Amount | None = None

    def limits(self, before: KeyLimits) -> KeyLimits:
        """Return the limits `before`, updated with the limits that the body contains."""
        sent = self.model_fields_set
        changes: dict[str, Any] = {own: getattr(self, name) for name, own in LIMIT_NAMES.items() if name in sent}
        for name, own in (("max_budget", "money_budget"), ("soft_budget", "soft_budget")):
            if name in sent:
                amount = getattr(self, name)
                changes[own] = None if amount is None else round(amount * MILLION)
        if "budget_duration" in sent:
            changes["budget_period"] = period_of(self.budget_duration)
        return replace(before, **changes)


# Limits that have the same unit here as in LiteLLM, by LiteLLM's names.
LIMIT_NAMES: Final = {
    "max_parallel_requests": "max_parallel",
    "tpm_limit": "tpm",
    "rpm_limit": "rpm",
    "token_budget": "token_budget",
}


def limit_answer(limits: KeyLimits, now: float, zone: tzinfo) -> dict[str, Json]:
    """Return limits in LiteLLM's format."""
    has_period = limits.has_budget or limits.soft_budget is not None
    ends = limits.budget_period.window(now, limits.budget_since, zone)[1] if has_period else None
    return {
        "max_budget": None if limits.money_budget is None else limits.money_budget / MILLION,
        "soft_budget": None if limits.soft_budget is None else limits.soft_budget / MILLION,
        "budget_duration": period_text(limits.budget_period),
        "budget_reset_at": iso(ends),
        "max_parallel_requests": limits.max_parallel,
        "tpm_limit": limits.tpm,
        "rpm_limit": limits.rpm,
        "token_budget": limits.token_budget,
    }


def period_text(period: Period) -> str | None:
    """Return a period as LiteLLM writes it; None for a budget that never renews."""
    match period.kind:
        case "none":
            return None
        case "month":
            return "1mo"
        case "day":
            return "day"
        case "every":
            unit = next(unit for unit in ("d", "h", "m", "s") if period.seconds % UNIT_SECONDS[unit] == 0)
            return f"{period.seconds // UNIT_SECONDS[unit]}{unit}"
