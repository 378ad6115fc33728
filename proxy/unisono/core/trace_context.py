"""Trace context of a request (W3C headers), and the ids that its spans carry.

Ids of child spans are not random, but derived from the id of the parent span. The code that sends a span id to a
backend, and the code that exports the span later, can therefore compute the same id independently.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from hashlib import blake2b
from typing import Final, Self

from unisono.core.frozen import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Position in a distributed trace, as in W3C Trace Context.

    Ids are in lower-case hexadecimal. `state` is the header `tracestate`, which is passed on unchanged.
    """

    trace_id: str
    span_id: str
    sampled: bool = True
    state: str = ""

    @classmethod
    def read(cls, parent: str, state: str = "") -> Self | None:
        """Parse the headers `traceparent` and `tracestate`; return None if `traceparent` is invalid."""
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
        """Return the child span with this name; its id depends only on this span and the name."""
        digest = blake2b(f"{self.trace_id}{self.span_id}{name}".encode(), digest_size=8).hexdigest()
        return TraceContext(self.trace_id, digest, self.sampled, self.state)


# Span in the headers of the request that is being processed; None if the headers contain no span.
ARRIVED: ContextVar[TraceContext | None] = ContextVar("ARRIVED", default=None)

# Current span of a generation, which is the parent of spans of tool servers; None if the request is not traced.
DOING: ContextVar[TraceContext | None] = ContextVar("DOING", default=None)


def step_span(number: int) -> str:
    """Return the name of a step's span for `TraceContext.child`; `number` is 0-based."""
    return f"step {number}"


def try_span(number: int) -> str:
    """Return the name of an attempt's span; `number` is its 0-based number within the answer."""
    return f"try {number}"


def tool_span(number: int) -> str:
    """Return the name of a server tool call's span; `number` is 0-based within the answer."""
    return f"tool {number}"


# Maximum number of characters of an id that the client chooses.
MAX_ID_LENGTH: Final = 256


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """Ids of a request; empty if unknown."""

    user: str = ""
    response_id: str = ""
    conversation_id: str = ""


UNKNOWN: Final = RequestIdentity()
IDENTITY: ContextVar[RequestIdentity] = ContextVar("IDENTITY", default=UNKNOWN)


def identify(*, user: str | None = None, response_id: str | None = None, conversation_id: str | None = None) -> None:
    """Set ids of the current request; None leaves an id unchanged.

    The ids apply to generations that start later in this task. Ids of more than `MAX_ID_LENGTH` characters are
    truncated.
    """
    known = IDENTITY.get()
    IDENTITY.set(
        RequestIdentity(
            known.user if user is None else user[:MAX_ID_LENGTH],
            known.response_id if response_id is None else response_id[:MAX_ID_LENGTH],
            known.conversation_id if conversation_id is None else conversation_id[:MAX_ID_LENGTH],
        )
    )
