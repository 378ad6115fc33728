"""Base class of enums whose members are keys of tables and sets."""

from __future__ import annotations

from enum import Enum


class TableKey(Enum):
    """Enum whose members have the hash of an object."""

    # Enum's own hash is a Python function, which would run for each lookup, such as for each token of a header.
    __hash__ = object.__hash__
