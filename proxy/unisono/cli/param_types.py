"""Parameter types for amounts, times and names on the command line.

Most of these types also accept a word such as `none`, which removes the setting.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Generic, TypeVar

import click

from unisono.core.budget_period import NO_PERIOD, Period
from unisono.core.frozen import dataclass

Value = TypeVar("Value")

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
PERIODS = {"none": NO_PERIOD, "day": Period("day"), "month": Period("month"), "1mo": Period("month")}
MICRO = 1_000_000
# Integers up to this limit are stored exactly by every store, even as floating-point numbers.
MAX_INTEGER = 2**53
# One hundred years: a longer duration is a mistake in the unit.
MAX_DURATION_S = 100 * 366 * 86_400


@dataclass(frozen=True, slots=True)
class OptionValue(Generic[Value]):
    """Value of an option that was given on the command line; None removes the setting.

    For an option that was not given, the command receives None instead of an `OptionValue`.
    """

    value: Value


class ParsedParam(click.ParamType[OptionValue[Value]], Generic[Value]):
    """Parameter type that parses text with `read`, which raises ValueError for invalid text.

    `hint` describes valid text, for the error message.
    """

    def __init__(self, name: str, read: Callable[[str], Value], hint: str) -> None:
        self.name = name
        self._read = read
        self._hint = hint

    def convert(
        self, value: str | OptionValue[Value], param: click.Parameter | None, ctx: click.Context | None
    ) -> OptionValue[Value]:
        if isinstance(value, OptionValue):
            return value
        try:
            return OptionValue(self._read(value.strip()))
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not {self._hint}", param, ctx)


def seconds(text: str) -> int:
    """Parse `90s`, `30m`, `12h`, `30d` or `2w` to seconds. Raises ValueError for other text."""
    found = re.fullmatch(r"(\d{1,10})([smhdw])", text, re.ASCII)
    if found is None or not (read := int(found[1]) * UNITS[found[2]]) <= MAX_DURATION_S:
        raise ValueError(text)
    return read


def _to_int(text: str) -> int | None:
    if text == "none":
        return None
    if not re.fullmatch(r"\d{1,16}", text, re.ASCII) or not 0 < int(text) <= MAX_INTEGER:
        raise ValueError(text)
    return int(text)


def _money(text: str) -> int | None:
    if text == "none":
        return None
    try:
        micro = Decimal(text) * MICRO
    except ArithmeticError:
        raise ValueError(text) from None
    # Check the bounds first: conversion of a number with a huge exponent to an integer takes minutes.
    if not micro.is_finite() or not 0 < micro <= MAX_INTEGER or micro != int(micro):
        raise ValueError(text)
    return int(micro)


def _period(text: str) -> Period:
    if text in PERIODS:
        return PERIODS[text]
    # A period of zero seconds would never contain any usage.
    if (read := seconds(text)) == 0:
        raise ValueError(text)
    return Period("every", read)


def _moment(text: str) -> float | None:
    if text == "never":
        return None
    now = time.time()
    if re.fullmatch(r"\d+[smhdw]", text, re.ASCII):
        return _future(now + seconds(text), now)
    read = datetime.fromisoformat(text)
    # A time without a zone is UTC, like all times in the output.
    at = (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    # Raises for times outside the calendar, which could not be printed.
    datetime.fromtimestamp(at, UTC)
    return _future(at, now)


def _future(at: float, now: float) -> float:
    # An expiry in the past is a mistake. To end a key at once, `unisono keys revoke` exists.
    if at <= now:
        raise ValueError(at)
    return at


def _names(text: str) -> frozenset[str] | None:
    if text == "all":
        return None
    if text == "none":
        return frozenset()
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError(text)
    return frozenset(map(line, names))


def line(text: str) -> str:
    """Return `text`. Raises ValueError unless it is 1 to 256 printable characters."""
    if not text or len(text) > 256 or not text.isprintable():
        raise ValueError(text)
    return text


DURATION = ParsedParam("DURATION", seconds, "a duration such as 90s, 30m, 12h, 30d or 2w")
AMOUNT = ParsedParam("N", _to_int, "a positive whole number, or none")
MONEY = ParsedParam("USD", _money, "an amount in USD with at most six decimals, such as 12.50, or none")
PERIOD = ParsedParam("PERIOD", _period, "day, month, none, or a duration such as 12h or 30d")
MOMENT = ParsedParam("WHEN", _moment, "a duration such as 12h or 30d, a future date such as 2099-01-31, or never")
NAMES = ParsedParam("NAMES", _names, "a list of names separated by commas, all, or none")
LINE = ParsedParam("TEXT", line, "one line of at most 256 printable characters")


def written_period(period: Period) -> str:
    """Format a period as it is given on the command line."""
    return written_seconds(period.seconds) if period.kind == "every" else period.kind


def written_seconds(whole: int) -> str:
    unit = next(unit for unit in ("d", "h", "m", "s") if whole % UNITS[unit] == 0)
    return f"{whole // UNITS[unit]}{unit}"
