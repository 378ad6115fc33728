"""How a stream of events stands on the wire, as data: its content type and what cuts it into events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from unisono_adapters._ndjson import LineCutter
from unisono_adapters._sse import EventCutter


class Cutter(Protocol):
    """Feed it reads, get the data of every event they complete. Raises EventTooLong."""

    def feed(self, read: bytes) -> list[bytes]: ...

    def end(self) -> list[bytes]: ...


@dataclass(frozen=True, slots=True)
class Framing:
    """`content_type` is what is asked for and what has to come back."""

    content_type: str
    cutter: Callable[[], Cutter]


SSE = Framing("text/event-stream", EventCutter)
NDJSON = Framing("application/x-ndjson", LineCutter)
