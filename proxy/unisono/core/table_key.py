"""Base class of enums whose members are keys of tables and sets."""

from __future__ import annotations

from enum import Enum


class TableKey(Enum):
    """Enum whose members are hashed by identity."""

    # `Enum.__hash__` is a slow Python function, which would run for each look-up, for example for each header token.
    __hash__ = object.__hash__
