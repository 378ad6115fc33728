"""Base class and common types of sections, and functions for values before validation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

# The upper bounds are generous, but stores and clocks can still represent the values.
Seconds = Annotated[float, Field(gt=0, le=1e10)]
Count = Annotated[int, Field(gt=0, le=10**12)]
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]


class Section(BaseModel):
    """Base class of all sections.

    Sections are frozen and reject unknown keys. Their error messages contain no values, which may be secret.
    """

    # Pydantic builds a validator only for `Config`, because only the whole configuration is parsed.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
        defer_build=True,
    )


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
