"""Checks of string formats. Strict schemas may not use other formats, which have no check."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from ipaddress import IPv4Address, IPv6Address

# Maximum characters of a string in one of these formats.
MAX_CHARACTERS = 1_000


def _parsed(parse: Callable[[str], object]) -> Callable[[str], bool]:
    def is_parsable(text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True

    return is_parsable


def _matches_pattern(expression: str) -> Callable[[str], bool]:
    shape = re.compile(expression, re.ASCII)
    return lambda text: shape.fullmatch(text) is not None


def _is_date_time(text: str) -> bool:
    """Check for an RFC 3339 timestamp: a date, a time of day and an offset."""
    return _DATE_TIME(text) and _parsed(datetime.fromisoformat)(_normalized(text))


def _is_time(text: str) -> bool:
    return _TIME(text) and _parsed(time.fromisoformat)(_normalized(text))


def _normalized(text: str) -> str:
    """Normalize for Python's parser: at most six digits of a second, upper-case letters."""
    return re.sub(r"(\.\d{6})\d+", r"\1", text.upper())


_OFFSET = r"(?:[zZ]|[+-]\d{2}:\d{2})"
_TIME = _matches_pattern(rf"\d{{2}}:\d{{2}}:\d{{2}}(?:\.\d{{1,9}})?{_OFFSET}")
_DATE_TIME = _matches_pattern(rf"\d{{4}}-\d{{2}}-\d{{2}}[tT ]\d{{2}}:\d{{2}}:\d{{2}}(?:\.\d{{1,9}})?{_OFFSET}")
_DATE = _matches_pattern(r"\d{4}-\d{2}-\d{2}")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"

FORMATS: Mapping[str, Callable[[str], bool]] = {
    "date-time": _is_date_time,
    "date": lambda text: _DATE(text) and _parsed(date.fromisoformat)(text),
    "time": _is_time,
    "duration": _matches_pattern(r"P(?=.)(?:\d+W|(?:\d+Y)?(?:\d+M)?(?:\d+D)?(?:T(?=\d)(?:\d+H)?(?:\d+M)?(?:\d+S)?)?)"),
    "email": _matches_pattern(rf"[^@\s]{{1,64}}@{_LABEL}(?:\.{_LABEL})*"),
    "hostname": _matches_pattern(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*"),
    "ipv4": _parsed(IPv4Address),
    "ipv6": lambda text: "%" not in text and _parsed(IPv6Address)(text),
    "uuid": _matches_pattern(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"),
}


def has_format(name: str, text: str) -> bool:
    """Return True if `text` has the format, or if the format is not checked."""
    check = FORMATS.get(name)
    return check is None or (len(text) <= MAX_CHARACTERS and check(text))
