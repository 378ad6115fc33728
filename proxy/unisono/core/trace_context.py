"""Position of a request in a distributed trace: reads and writes W3C Trace Context headers.

No randomness: ids of child spans are derived from the parent's. The code that sends a span to a backend and the code
that exports it later therefore compute the same id independently.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from hashlib import blake2b
from typing import Self

from unisono.core.frozen import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Position in a distributed trace, as in W3C Trace Context.

    Ids are lower-case hexadecimal; `state` is passed on unchanged.
    """

    trace_id: str
    span_id: str
    sampled: bool = True
    state: str = ""

    @classmethod
    def read(cls, parent: str, state: str = "") -> Self | None:
        """Parse the headers `traceparent` and `tracestate`; return None if invalid."""
        match = _TRACEPARENT.fullmatch(parent)
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        if version == "ff" or (version == "00" and more) or not (int(trace_id, 16) and int(span_id, 16)):
            return None
        tracestate = state if _TRACESTATE.fullmatch(state) else ""
        return cls(trace_id, span_id, bool(int(flags, 16) & 1), tracestate)

    @property
    def parent(self) -> str:
        """Header `traceparent` for requests sent on behalf of this span."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    @property
    def headers(self) -> dict[str, str]:
        """Both headers, with lower-case names."""
        return {"traceparent": self.parent} | ({"tracestate": self.state} if self.state else {})

    def child(self, name: str) -> TraceContext:
        """Return the child span of that name; the id is the same wherever it is computed."""
        digest = blake2b(f"{self.trace_id}{self.span_id}{name}".encode(), digest_size=8).hexdigest()
        return TraceContext(self.trace_id, digest, self.sampled, self.state)


# Span named by the request that is being processed; None if it named none.
ARRIVED: ContextVar[TraceContext | None] = ContextVar("ARRIVED", default=None)

# Current span of a generation, the parent for tool server spans; None if nothing is traced.
DOING: ContextVar[TraceContext | None] = ContextVar("DOING", default=None)


def step_span(number: int) -> str:
    """Return the name of a step's span for `TraceContext.child`; steps count from 0."""
    return f"step {number}"


def try_span(number: int) -> str:
    """Return the name of an attempt's span below its step, by its number within the answer."""
    return f"try {number}"


def tool_span(number: int) -> str:
    """Return the name of a server tool call's span below its answer's span."""
    return f"tool {number}"
