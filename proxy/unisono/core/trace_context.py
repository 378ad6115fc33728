"""Where a request stands in a distributed trace: W3C's Trace Context, read, gone on with, and told to others.

No randomness: the ids of spans below a turn are derived from the turn's own, so whoever tells a backend of a span and
whoever exports that span later come to the same id without speaking of it.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a distributed trace, as W3C's Trace Context has it: ids in lower-case hexadecimal, `state` as others
    made it."""

    trace_id: str
    span_id: str
    sampled: bool = True
    state: str = ""

    @classmethod
    def read(cls, parent: str, state: str = "") -> Self | None:
        """From the headers `traceparent` and `tracestate`; None for what is not one."""
        match = _TRACEPARENT.fullmatch(parent)
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        if version == "ff" or (version == "00" and more) or not (int(trace_id, 16) and int(span_id, 16)):
            return None
        kept = state if _TRACESTATE.fullmatch(state) else ""
        return cls(trace_id, span_id, bool(int(flags, 16) & 1), kept)

    @property
    def parent(self) -> str:
        """The header `traceparent` for what is done on behalf of this span."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    @property
    def headers(self) -> dict[str, str]:
        """By their names in lower case."""
        return {"traceparent": self.parent} | ({"tracestate": self.state} if self.state else {})

    def child(self, name: str) -> TraceContext:
        """The span of that name below this one: the same id wherever it is asked for."""
        digest = blake2b(f"{self.trace_id}{self.span_id}{name}".encode(), digest_size=8).hexdigest()
        return TraceContext(self.trace_id, digest, self.sampled, self.state)


ARRIVED: ContextVar[TraceContext | None] = ContextVar("ARRIVED", default=None)
"""The span that the request, for which whatever runs now runs, came from; None where it named none."""

DOING: ContextVar[TraceContext | None] = ContextVar("DOING", default=None)
"""The span of what is being done now for a turn, for tool servers to go on below it; None where nothing is traced."""


def step_span(number: int) -> str:
    """The name of a step's span below its turn's, for `TraceContext.child`; steps count from 0."""
    return f"step {number}"


def try_span(number: int) -> str:
    """That of a generation below its step's, by its place among all generations of the turn."""
    return f"try {number}"


def tool_span(number: int) -> str:
    """That of a call of a hosted tool below its turn's."""
    return f"tool {number}"
