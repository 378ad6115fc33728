"""Which configured values are plausible secrets, so that logs leave them out and keep ordinary words."""

from __future__ import annotations

from typing import Final

MIN_LENGTH: Final = 6
MIN_DISTINCT: Final = 4
MIN_WORDS_LENGTH: Final = 20
"""Characters of words from which on they are a passphrase; `sk-no-key-required` is no secret."""
MIN_DIGITS_LENGTH: Final = 12
"""Digits from which on a number is a secret; shorter ones are counts and ports."""


def is_plausible_secret(value: str) -> bool:
    """Whether a value is long and random enough to be one: `none`, `EMPTY` and `dummy` are not."""
    if len(value) < MIN_LENGTH or len(set(value)) < MIN_DISTINCT:
        return False
    if value.isascii() and value.isdigit():
        return len(value) >= MIN_DIGITS_LENGTH
    letters = value.replace("-", "").replace("_", "")
    if letters.isascii() and letters.isalpha() and (letters.islower() or letters.isupper() or letters.istitle()):
        return len(value) >= MIN_WORDS_LENGTH
    return True
