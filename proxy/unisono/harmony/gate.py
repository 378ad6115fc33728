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
        """Return the content of a complete text or call, or None to stop reading after it.

        The content is all of the text, or the part inside an enclosing code fence. Text that was already
        emitted stays as it is. None means that nothing of the message was emitted.
        """
        ...

    def limits_blanks(self, header: Header) -> bool:
        """Return whether the body is JSON that is read only up to a long run of blanks.

        Blanks inside strings do not count.
        """
        ...

    @property
    def unfit(self) -> bool:
        """True if the last accepted answer lacks the required form.

        Such an answer is emitted as a refusal.
        """
        ...


@dataclass(frozen=True, slots=True)
class Stopped:
    """Message at which a gate stopped reading.

    It begins at the position `start`, its header ends at `header_end`, and it was read until `end` (positions
    as in `message_parts`). `tokens` are its legal header.
    """

    header: Header
    tokens: tuple[int, ...]
    start: int
    header_end: int
    end: int
    # Text of the message; None if reading stopped before it.
    text: str | None = None
    # Body without the long run of blanks; None if reading stopped for another reason.
    trimmed: tuple[int, ...] | None = None
    # True if the trimmed body is complete JSON.
    is_complete: bool = False
    # True if a part of it was emitted to the client.
    is_emitted: bool = False
