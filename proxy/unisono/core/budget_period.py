"""Renewal periods of budgets, on the calendar of a time zone."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Final, Literal, TypeAlias

from unisono.core.frozen import dataclass

# Seconds of a day on which the clock is not changed.
DAY_S: Final = 86_400
# Periods of this many days begin on a Monday and on the first of a month.
DAYS_OF_WEEK: Final = 7
DAYS_OF_MONTH: Final = 30
# An arbitrary Monday, from which weeks are counted.
MONDAY: Final = date(1970, 1, 5)

PeriodKind: TypeAlias = Literal["none", "day", "month", "every"]


@dataclass(frozen=True, slots=True)
class Period:
    """Renewal period of a budget.

    With kind `none`, the budget is never renewed. The kinds `day` and `month` follow the calendar. With kind `every`,
    the budget is renewed every `seconds` seconds. If `seconds` is a whole number of days, the period begins at
    midnight, as in LiteLLM: 7 days begin on Monday, 30 days on the first of the month. Other numbers of days are
    counted from the day on which the key was created. All other periods are counted from the second at which the key
    was created.
    """

    kind: PeriodKind = "none"
    seconds: int = 0

    def window(self, now: float, since: float = 0.0, zone: tzinfo = UTC) -> tuple[float, float | None]:
        """Return the start of the period that contains `now`, and the start of the next period.

        The second value is None if the budget is never renewed. All times are in seconds since 1970. `since` is the
        start of the first period of kind `every`. `zone` is the configured time zone, in which midnight is determined.
        It is the same on every replica, and independent of the machine's time zone.
        """
        if self.kind == "none":
            return 0.0, None
        if self.kind == "every" and self.seconds % DAY_S:
            start = since + (now - since) // self.seconds * self.seconds
            return start, start + self.seconds
        first, following = self._days(datetime.fromtimestamp(now, zone).date(), since, zone)
        return _midnight(first, zone), _midnight(following, zone)

    def name(self, start: float) -> str:
        """Return the name under which the store counts the period that began at `start`."""
        return f"{self.kind}:{start:.0f}"

    def _days(self, today: date, since: float, zone: tzinfo) -> tuple[date, date]:
        """Return the first days of the period that contains `today` and of the period after it."""
        days = 1 if self.kind == "day" else self.seconds // DAY_S
        if self.kind == "month" or days == DAYS_OF_MONTH:
            first = today.replace(day=1)
            # Every month has at least 28 days, so 32 days after its first day lies in the next month.
            return first, (first + timedelta(days=32)).replace(day=1)
        origin = MONDAY if days == DAYS_OF_WEEK else datetime.fromtimestamp(since, zone).date()
        first = today - timedelta(days=(today - origin).days % days)
        return first, first + timedelta(days=days)


@lru_cache(maxsize=64)
def _midnight(day: date, zone: tzinfo) -> float:
    """Return the start of a day in seconds since 1970.

    A day on which the clock is changed has 23 or 25 hours. If midnight occurs twice, the day starts at the first
    midnight. If midnight does not exist, the day starts when the clock is changed.
    """
    return datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()


NO_PERIOD = Period()
