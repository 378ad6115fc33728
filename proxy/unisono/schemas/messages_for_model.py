"""Messages about schema violations, written for the model that has to correct its answer.

Safe for untrusted texts and schemas: work is limited, no expression runs on a backtracking engine, and messages quote
at most short parts of an answer. The schema must have passed `check`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

import orjson

from unisono.schemas.judging import Complaint, Judge, WorkLimitReached

LONGEST = 1_000_000
"""Maximum characters of an answer."""
DEEPEST = 64
"""Maximum nesting depth of values."""
MAX_DIGITS = 20_000
DIGITS_AT_ONCE = 4_000
MOST_TOLD = 5
"""Maximum violations in one message."""


def violation(schema: Mapping[str, object], text: str) -> str | None:
    """Describe how `text` violates `schema`; None if it is valid.

    An answer that exceeds the validation limits counts as invalid; its message demands a smaller one.
    """
    if len(text) > LONGEST:
        return f"The answer is too long: it has to be JSON of at most {LONGEST:,} characters."
    try:
        value = _parsed(text)
    except orjson.JSONDecodeError as error:
        return _unreadable(text, error)
    if _is_deep(value):
        return f"The answer is too deep: values may stand {DEEPEST} deep in one another."
    try:
        told = [str(complaint) for complaint in _first(Judge(schema).complaints(value))]
    except WorkLimitReached:
        return "The answer is too large to be checked against its schema: make it smaller and simpler."
    return " ".join(told) or None


def _first(complaints: Iterable[Complaint]) -> Iterable[Complaint]:
    told: list[Complaint] = []
    for complaint in complaints:
        if complaint not in told:
            told.append(complaint)
        if len(told) == MOST_TOLD:
            break
    return told


def _parsed(text: str) -> object:
    """Parse JSON with integers of up to `MAX_DIGITS` digits. Raises orjson.JSONDecodeError."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if "infinity" not in error.msg:
            raise
        try:
            # orjson rejects integers that are too large for a float.
            return json.loads(text, parse_int=_integer, parse_float=_finite)
        except (ValueError, RecursionError):
            raise error from None


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError("too many digits")
    digits = text.removeprefix("-")
    value = 0
    # `int` rejects texts of more than 4,300 digits.
    for start in range(0, len(digits), DIGITS_AT_ONCE):
        piece = digits[start : start + DIGITS_AT_ONCE]
        value = value * 10 ** len(piece) + int(piece)
    return -value if text.startswith("-") else value


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("out of range")
    return value


def _unreadable(text: str, error: orjson.JSONDecodeError) -> str:
    if not text.strip():
        return "The answer is empty: it has to be JSON."
    if text.lstrip().startswith("```"):
        return "The answer has to be JSON alone, without a code block around it."
    why = error.msg.partition(": line")[0]
    return f"The answer is not valid JSON: {why} at line {error.lineno}, column {error.colno}."


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        if not inner:
            return False
        level = inner
    return True
