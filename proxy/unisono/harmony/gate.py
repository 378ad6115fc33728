"""Gate of the router: accepts or stops messages as they open and close."""

from __future__ import annotations

from typing import Protocol

from unisono.core.frozen import dataclass
from unisono.harmony.header import Header
from unisono.harmony.message_parts import OpenPart


class Gate(Protocol):
    """Policy that accepts or stops messages; called once or twice per message, never per token."""

    def opens(self, message: OpenPart) -> bool:
        """Return False to stop reading before the message; nothing of it was emitted."""
        ...

    def is_buffered(self, header: Header) -> bool:
        """Return whether a text or a call is emitted only when complete."""
        ...

    def closes(self, header: Header, text: str, *, held: bool) -> str | None:
        """Return the content of a complete text or call, or None to reject it and stop reading.

        The content is the whole text, or a part of it without an enclosure such as a code fence. If `held` is False,
        the text was already emitted, and the result is ignored.
        """
        ...

    def limits_blanks(self, header: Header) -> bool:
        """Return whether reading stops in the body if it has too many blanks in a row.

        This is meant for bodies that are JSON. Blanks inside JSON strings do not count.
        """
        ...

    @property
    def unfit(self) -> bool:
        """True if the last accepted answer does not have the form that the request demands.

        Such an answer is emitted as a refusal.
        """
        ...


@dataclass(frozen=True, slots=True)
class Stopped:
    """Message at which a gate stopped reading.

    The message begins at the position `start`, its header ends at `header_end`, and reading stopped at `end`.
    `message_parts` explains positions. `tokens` are the tokens of the message's legal header.
    """

    header: Header
    tokens: tuple[int, ...]
    start: int
    header_end: int
    end: int
    # Text of the message; None if reading stopped before it.
    text: str | None = None
    # Tokens of the body without the blanks at its end; None if reading did not stop because of blanks.
    trimmed: tuple[int, ...] | None = None
    # True if the trimmed body is complete JSON.
    is_complete: bool = False
    # True if a part of the message was emitted to the client.
    is_emitted: bool = False
