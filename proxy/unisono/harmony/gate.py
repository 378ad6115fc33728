"""The router's gate: decides on messages as they open and close. Also the place where a gate stopped the reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from unisono.harmony.header import Header
from unisono.harmony.message_parts import OpenPart


class Gate(Protocol):
    """Decides which messages there are at all. Asked once or twice for each message, never for a token."""

    def opens(self, message: OpenPart) -> bool:
        """False: reading stops in front of the message, and nothing of it was said."""
        ...

    def holds(self, header: Header) -> bool:
        """Whether nothing of a text is shown before it is complete, as it is with calls."""
        ...

    def closes(self, header: Header, text: str, *, held: bool) -> str | None:
        """What a complete text or call says: all of it, or what stands in a code fence around it; one that was shown
        says what it says. None: reading stops behind it, and nothing of it was said."""
        ...

    def limits_blanks(self, header: Header) -> bool:
        """Whether reading stops at a long run of blanks outside of strings in the body, which has to be JSON."""
        ...

    @property
    def unfit(self) -> bool:
        """Whether the text that was let through last is not what it had to be."""
        ...


@dataclass(frozen=True, slots=True)
class Stopped:
    """Where a gate stopped the reading: the message that begins at the place `begin` has its header until `header_end`
    and was read until `end` (see `legal` for places). `tokens` are its legal header."""

    header: Header
    tokens: tuple[int, ...]
    begin: int
    header_end: int
    end: int
    text: str | None = None
    """What it says; None in front of it."""
    trimmed: tuple[int, ...] | None = None
    """Its body without the run of blanks that the reading stopped at; None where it stopped for another reason."""
    is_complete: bool = False
    """Whether the trimmed body is complete JSON."""
    is_shown: bool = False
    """Whether the client has a part of it."""
