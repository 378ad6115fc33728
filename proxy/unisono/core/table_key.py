"""Base class of enums whose members are keys of tables and sets."""

from __future__ import annotations

from enum import Enum


class TableKey(Enum):
    """Enum whose members are hashed by identity."""

    # The hash of `Enum` is a Python function, which would run for each lookup, for example for each token of a header.
    __hash__ = object.__hash__
