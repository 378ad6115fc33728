"""Limits of the connections of one listener."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.api.error_responses import Formats


@dataclass(frozen=True, slots=True)
class ListenerSettings:
    """Limits of the connections of one listener; see `listener.connections`."""

    header_timeout_s: float
    max_header_bytes: int
    write_timeout_s: float
    max_connections: int | None
    formats: Formats
