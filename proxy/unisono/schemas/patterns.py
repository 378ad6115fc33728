"""Regular expressions of clients, run by an engine whose time is linear in the text, whatever the expression.

That is Rust's, as pydantic brings it along; Python's own can be made to run for ever by a line of text. Look-around and
back references are what it leaves out, and no grammar of a backend has them either.
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import prod

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

LONGEST = 1_000
"""Characters of one expression."""
MOST_REPEATS = 2_000
"""How often one expression may write out a part of itself: `(a{10}){10}` is a hundred."""

_COUNTED = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")
_KEPT = 64


class BadPattern(ValueError):
    """Why an expression is not taken."""


def check_pattern(pattern: str) -> int:
    """How often it writes out parts of itself, which is what it costs. Raises BadPattern."""
    if len(pattern) > LONGEST:
        raise BadPattern(f"it has more than {LONGEST:,} characters")
    repeats = prod(max(int(most or 0), int(least), 1) for least, most in _COUNTED.findall(pattern))
    if repeats > MOST_REPEATS:
        raise BadPattern(f"it repeats a part of itself more than {MOST_REPEATS:,} times")
    _compiled(pattern)
    return repeats


def found(pattern: str, text: str) -> bool:
    """Whether the expression matches anywhere in `text`. Raises BadPattern."""
    try:
        _compiled(pattern).validate_python(text)
    except ValidationError:
        return False
    return True


@lru_cache(_KEPT)
def _compiled(pattern: str) -> SchemaValidator:
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        why = str(error).rpartition("error: ")[2].strip()
        raise BadPattern(f"it is no regular expression that can be run: {' '.join(why.split())[:200]}") from error
