"""Limits of the connections of one listener."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.api.error_responses import Formats


@dataclass(frozen=True, slots=True)
class ListenerSettings:
    """Header, write and connection limits; `formats` maps paths to error formats of APIs.

    `listener.connections` documents each limit. Times are in seconds.
    """

    header_timeout_s: float
    max_header_bytes: int
    write_timeout_s: float
    max_connections: int | None
    formats: Formats
