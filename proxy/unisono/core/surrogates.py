"""Replacement of lone surrogates, which neither UTF-8 nor JSON can carry, in Python text.

They come from arguments and variables that are not UTF-8, from JSON escapes, and from strings that other code cut in
the middle of a character.
"""

from __future__ import annotations

from unisono.core.conversation import Json
from unisono.errors import well_formed


def is_well_formed(text: str) -> bool:
    return text.isascii() or well_formed(text) == text


def all_well_formed(value: Json) -> Json:
    """Apply `well_formed` to every text in a value, keys included."""
    match value:
        case str():
            return well_formed(value)
        case list():
            return [all_well_formed(each) for each in value]
        case dict():
            return {well_formed(key): all_well_formed(each) for key, each in value.items()}
        case _:
            return value
