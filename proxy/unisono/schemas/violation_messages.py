"""Messages that describe how a text violates a schema.

The engine only checks whether there is a violation. The message is for a client whose answer to a tool's question is
invalid. The functions are safe for untrusted texts and schemas: the work is limited, no regular expression is matched
with backtracking, and a message quotes only short parts of the text. The schema must have passed `check` of this
package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping

import orjson

from unisono.core.conversation import TextGrammar
from unisono.schemas.grammars import text_violation
from unisono.schemas.validation import Mismatch, Validator, WorkLimitReached

# Maximum characters of an answer.
MAX_CHARACTERS = 1_000_000
# Maximum nesting depth of values.
MAX_LEVELS = 64
# Maximum digits of an integer.
MAX_DIGITS = 20_000
# Python refuses to convert more than 4,300 digits at once.
DIGITS_PER_CONVERSION = 4_000
# Maximum violations in one message.
MAX_REPORTED = 5


def violation(
    schema: Mapping[str, object] | TextGrammar, text: str, processor_time: Callable[[], float] = lambda: 0.0
) -> str | None:
    """Describe how `text` violates `schema`; None if it is valid.

    `processor_time` is a clock in seconds, which limits the checks of grammars. An answer that exceeds the validation
    limits is treated as invalid, with a message that requests a smaller answer.
    """
    if isinstance(schema, TextGrammar):
        return text_violation(schema, text, processor_time)
    if len(text) > MAX_CHARACTERS:
        return f"The answer is too long: write JSON of at most {MAX_CHARACTERS:,} characters."
    try:
        value = _parsed(text)
    except orjson.JSONDecodeError as error:
        return _unreadable(text, error)
    if _is_too_deep(value):
        return f"The answer is nested too deeply: use at most {MAX_LEVELS} levels."
    try:
        return " ".join(map(str, _first(Validator(schema).validate(schema, value)))) or None
    except WorkLimitReached:
        return "The answer is too large to be checked against its schema: make it smaller and simpler."


def _first(mismatches: Iterable[Mismatch]) -> Iterable[Mismatch]:
    """Return the first mismatches without duplicates, at most `MAX_REPORTED`."""
    found: list[Mismatch] = []
    for mismatch in mismatches:
        if mismatch not in found:
            found.append(mismatch)
        if len(found) == MAX_REPORTED:
            break
    return found


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
    # `int` rejects strings of more than 4,300 digits, and conversion with Decimal takes ten times as long.
    for start in range(0, len(digits), DIGITS_PER_CONVERSION):
        piece = digits[start : start + DIGITS_PER_CONVERSION]
        value = value * 10 ** len(piece) + int(piece)
    return -value if text.startswith("-") else value


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("out of range")
    return value


def _unreadable(text: str, error: orjson.JSONDecodeError) -> str:
    if not text.strip():
        return "The answer is empty: write JSON."
    if text.lstrip().startswith("```"):
        return "The answer must be JSON alone, without a code block around it."
    reason = error.msg.partition(": line")[0]
    return f"The answer is not valid JSON: {reason} at line {error.lineno}, column {error.colno}."


def _is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_LEVELS):
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
