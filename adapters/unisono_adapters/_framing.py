"""Framing of an event stream: its content type and its splitter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from unisono_adapters._ndjson import LineCutter
from unisono_adapters._sse import EventCutter


class Cutter(Protocol):
    """Splitter from reads to the data of complete events. Raises EventTooLong."""

    def feed(self, read: bytes) -> list[bytes]: ...

    def end(self) -> list[bytes]: ...


@dataclass(frozen=True, slots=True)
class Framing:
    """Framing of a stream; `content_type` is both requested and required."""

    content_type: str
    cutter: Callable[[], Cutter]


SSE = Framing("text/event-stream", EventCutter)
NDJSON = Framing("application/x-ndjson", LineCutter)
