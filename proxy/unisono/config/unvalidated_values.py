"""Functions for values of a parsed configuration file that is not validated yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def described(value: object) -> str:
    """Return the type of a value in words, for error messages."""
    names = {"NoneType": "empty", "str": "text", "int": "a number", "float": "a number", "bool": "true or false"}
    if isinstance(value, Mapping):
        return "a mapping"
    return names.get(type(value).__name__, f"a {type(value).__name__}")


def entries_of(raw: object, section: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the entries of the list `section` that are mappings, each with its 0-based index."""
    listed = raw.get(section) if isinstance(raw, Mapping) else None
    for index, entry in enumerate(listed if isinstance(listed, list) else []):
        if isinstance(entry, Mapping):
            yield index, entry
