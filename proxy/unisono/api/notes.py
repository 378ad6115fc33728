"""Notes: what of a request was accepted without effect, told to the client beside the answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_NOTES = 32
SILENT: tuple[Any, ...] = (None, False, "", [], {})
"""Values of a field without effect that need no note: they ask for nothing."""


def without_effect(prefix: str, fields: Mapping[str, Any]) -> Iterator[str]:
    return (f"{prefix}{name[:64]}: no effect" for name, value in fields.items() if value not in SILENT)
