"""Whole numbers in bodies that are passed through, as lenient servers read them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from unisono.core.conversation import Json
from unisono.errors import InvalidRequest

# Texts that Pydantic reads as an integer, unless its strict mode is on. vLLM and SGLang read bodies in this way.
WHOLE: Final = re.compile(r"\s*([+-]?\d{1,30}(?:_\d{1,30})*)(?:\.0*)?\s*", re.ASCII)
# Maximum number of characters of a number that is sent as a string.
MAX_LENGTH: Final = 100


def whole_number(body: Mapping[str, Json], name: str) -> int | None:
    """Return the number in the field `name`; None if the field is missing or null.

    Servers also accept a whole number as a float or a string. Raises InvalidRequest for any other value, because a
    server might read it as a number that the reservation does not include.
    """
    value = body.get(name)
    if value is None or isinstance(value, int):
        return None if value is None else int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and (found := WHOLE.fullmatch(value)) and len(value) <= MAX_LENGTH:
        return int(found[1])
    raise InvalidRequest(f"Invalid value for '{name}': must be a whole number.", param=name)
