"""Limits on data exchanged with a tool server. Each bounds the cost of a hostile server."""

from __future__ import annotations

from unisono.core.frozen import dataclass

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class McpLimits:
    """Sizes in bytes of UTF-8 or on the wire, durations in seconds."""

    # Arguments of one call, as JSON.
    arguments_bytes: int = 1 * MIB
    # Text of one result for the model; the excess is cut, and the text says so. Text with many JSON escapes has a
    # lower limit: a result is stored as JSON, twice, and has to fit in an item of the store
    # (`store.codec.StateLimits`).
    output_bytes: int = 256 * KIB
    # One message of a server; a larger one ends its exchange.
    answer_bytes: int = 8 * MIB
    # Consecutive lines of a server's standard output that are not messages. At this number, its process is ended.
    ignored_lines: int = 10_000
    # All tools of a server together, as JSON. Fits in an item of the store.
    list_bytes: int = 768 * KIB
    tools: int = 512
    # Pages of one list.
    pages: int = 64
    # Parts of one result, or tools on one page; each costs time to parse.
    entries: int = 1024
    # Maximum number of strings, punctuation marks and brackets that are scanned in one message.
    looked_through: int = 2_000_000
    # Cache lifetime of a list, unless its server reports a change earlier.
    list_ttl_s: float = 300.0
    # Open connections; the least recently used idle one is closed to make room.
    sessions: int = 256
    # Queued calls of one owner at one server.
    waiting: int = 256
    # Timeout for an orderly close.
    closing_s: float = 2.0
    # Timeout for a server to accept a message that has no answer.
    aside_s: float = 10.0
    # Minimum interval between two requests for the stream of notifications of one server.
    reconnect_s: float = 1.0
