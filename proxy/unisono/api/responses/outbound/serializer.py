"""Serialization of events as JSON, numbered from 0, in the dialect of the client.

Each item has one template for its delta events, which is filled with the number of the event and the JSON of the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson

from unisono.api.responses.outbound.dialects import Dialect


class WireEvent(NamedTuple):
    """Serialized event. `data` is its JSON, which a WebSocket sends unchanged."""

    number: int
    type: str
    data: bytes

    def sse(self) -> bytes:
        """Return the bytes of the event in an HTTP stream (server-sent events)."""
        return b"event: " + self.type.encode() + b"\ndata: " + self.data + b"\n\n"


def sse_of(events: Iterable[WireEvent]) -> bytes:
    return b"".join([event.sse() for event in events])


class DeltaForm(NamedTuple):
    """Template of an item's delta events: the bytes around the number and the text.

    In an HTTP stream, the event begins with `sse` instead of `before`.
    """

    name: str
    sse: bytes
    before: bytes
    middle: bytes
    after: bytes


class EventSerializer:
    """Serializer of events, in order. If `should_emit` is False, events are only counted."""

    def __init__(self, dialect: Dialect, *, should_emit: bool = True) -> None:
        self.should_emit = should_emit
        self.number = 0
        self._dialect = dialect
        self._events: list[WireEvent] = []

    def add(self, name: str, body: Mapping[str, Any]) -> None:
        if self.should_emit:
            name = self._dialect.event(name)
            data = orjson.dumps({"type": name, "sequence_number": self.number, **body})
            self._events.append(WireEvent(self.number, name, data))
        self.number += 1

    def form(self, name: str, where: Mapping[str, Any], more: Mapping[str, Any] | None) -> DeltaForm:
        """Return a delta template. `where` has the fields before the text, `more` those after it."""
        name = self._dialect.event(name)
        before = orjson.dumps({"type": name})[:-1] + b',"sequence_number":'
        middle = b"," + orjson.dumps(where)[1:-1] + b',"delta":'
        after = (b"," + orjson.dumps(more)[1:-1] if more else b"") + b"}"
        return DeltaForm(name, b"event: %b\ndata: %b" % (name.encode(), before), before, middle, after)

    def sse_delta(self, form: DeltaForm, text: str) -> bytes:
        """Return the bytes of a delta event in an HTTP stream.

        All earlier events must have been removed with `pop_events`.
        """
        data = b"%b%d%b%b%b\n\n" % (form.sse, self.number, form.middle, orjson.dumps(text), form.after)
        self.number += 1
        return data

    def delta(self, form: DeltaForm, text: str) -> None:
        if self.should_emit:
            data = b"%b%d%b%b%b" % (form.before, self.number, form.middle, orjson.dumps(text), form.after)
            self._events.append(WireEvent(self.number, form.name, data))
        self.number += 1

    def pop_events(self) -> list[WireEvent]:
        events, self._events = self._events, []
        return events
