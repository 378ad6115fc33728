"""How much is taken from a tool server, and given to one. Every number is a bound on what a hostile one can cost."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class McpLimits:
    """Bytes are of UTF-8 or of the wire, durations are seconds."""

    arguments_bytes: int = 1 * MIB
    """Arguments of one call, as JSON."""
    output_bytes: int = 256 * KIB
    """Text of one result for the model; the rest is cut off, and the text says so. Less of what JSON has to spell out:
    a result is kept as JSON, twice, and has to fit in an item of the store (`core.state.Bounds`)."""
    answer_bytes: int = 8 * MIB
    """One message of a server; a larger one ends the exchange it belongs to."""
    list_bytes: int = 768 * KIB
    """All tools of a server together, as JSON. Fits in an item of the store."""
    tools: int = 512
    pages: int = 64
    """Pages of one list."""
    entries: int = 1024
    """Parts of one result, or tools on one page: reading each of them takes its time."""
    looked_through: int = 2_000_000
    """Strings, marks and brackets of one message that are looked through at all."""
    list_ttl_s: float = 300.0
    """How long a list is believed, unless its server says earlier that it changed."""
    sessions: int = 256
    """Open connections; the one unused for longest makes room."""
    waiting: int = 256
    """Calls of one owner that may wait for a place at one server."""
    closing_s: float = 2.0
    """What a server is given to say good-bye."""
    aside_s: float = 10.0
    """What a server may take to accept a message that has no answer."""
    reconnect_s: float = 1.0
    """At least this long between two attempts to listen to one server."""
