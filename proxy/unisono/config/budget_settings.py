"""Budgets and their periods, in LiteLLM's notation."""

from __future__ import annotations

import re
from datetime import UTC, tzinfo
from typing import Annotated, Any, Final
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field, model_validator

from unisono.config.section_base import Section
from unisono.core.budget_period import Period

_FORM: Final = re.compile(r"([1-9]\d{0,5})(mo|s|m|h|d|w)")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800, "mo": 30 * 86_400}
# Maximum length of a period, about 100 years. A longer period is a mistake, and may end after the last date in Python.
_MAX_S: Final = 100 * 366 * 86_400


def to_period(value: Any) -> Period:
    """Parse the renewal period of a budget, such as `30d`.

    Raises ValueError if the value does not have this form. Periods of a day or longer begin at midnight in the
    configured time zone. `1mo` is a calendar month. Several months, such as `2mo`, are counted as 30 days each.
    """
    if value == "1mo":
        return Period("month")
    found = _FORM.fullmatch(value) if isinstance(value, str) else None
    if found is None or (seconds := int(found[1]) * _SECONDS[found[2]]) > _MAX_S:
        raise ValueError(
            "must be a number and a unit (s, m, h, d, w, mo), such as `30d`, or `1mo` for a calendar month; the "
            "maximum is 100 years"
        )
    return Period("every", seconds)


def to_zone(name: str) -> tzinfo:
    """Return the time zone of this name.

    Raises ValueError if the IANA database does not have it.
    """
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(
            "must be the name of a time zone in the IANA database, such as `Europe/Berlin`; if the name is correct, "
            "install the system package tzdata"
        ) from None


def _check_zone(value: str) -> str:
    """Return `value` unchanged. Raises ValueError if it is not the name of a time zone."""
    to_zone(value)
    return value


def _check_duration(value: str) -> str:
    """Return `value` unchanged. Raises ValueError if it is not a duration."""
    to_period(value)
    return value


Money = Annotated[float, Field(ge=0, le=1e9)]
ZoneName = Annotated[str, AfterValidator(_check_zone)]
Duration = Annotated[str, AfterValidator(_check_duration)]


class ProviderBudget(Section):
    """Budget for all deployments of one provider together."""

    budget_limit: Money | None = None
    """Maximum cost in USD per `time_period`."""
    max_budget: Money | None = None
    """Same as `budget_limit`."""
    time_period: Duration | None = None
    """Period after which the budget renews, such as `1d`. By default it never renews."""
    budget_duration: Duration | None = None
    """Same as `time_period`."""

    @model_validator(mode="after")
    def _has_limit(self) -> ProviderBudget:
        if (self.budget_limit is None) == (self.max_budget is None):
            raise ValueError("must have either `budget_limit` or `max_budget`")
        if self.time_period is not None and self.budget_duration is not None:
            raise ValueError("`time_period` and `budget_duration` are the same setting; remove one")
        return self
