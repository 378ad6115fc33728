"""Limits on data exchanged with a tool server. Each bounds the cost of a hostile server."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class McpLimits:
    """Sizes in bytes of UTF-8 or on the wire, durations in seconds."""

    arguments_bytes: int = 1 * MIB
    """Arguments of one call, as JSON."""
    output_bytes: int = 256 * KIB
    """Text of one result for the model; the excess is cut, and the text says so.

    Text with many JSON escapes has a lower limit: a result is stored as JSON, twice, and has to fit in an item of the
    store (`core.state_store.StateLimits`).
    """
    answer_bytes: int = 8 * MIB
    """One message of a server; a larger one ends its exchange."""
    list_bytes: int = 768 * KIB
    """All tools of a server together, as JSON. Fits in an item of the store."""
    tools: int = 512
    pages: int = 64
    """Pages of one list."""
    entries: int = 1024
    """Parts of one result, or tools on one page; each costs time to parse."""
    looked_through: int = 2_000_000
    """Strings, punctuation marks and brackets of one message that are scanned at most."""
    list_ttl_s: float = 300.0
    """Cache lifetime of a list, unless its server reports a change earlier."""
    sessions: int = 256
    """Open connections; the least recently used idle one is closed to make room."""
    waiting: int = 256
    """Queued calls of one owner at one server."""
    closing_s: float = 2.0
    """Timeout for an orderly close."""
    aside_s: float = 10.0
    """Timeout for a server to accept a message that has no answer."""
    reconnect_s: float = 1.0
    """Minimum interval between two attempts to listen to one server."""
