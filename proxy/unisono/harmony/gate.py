"""Parts of repaired messages, and the gate that accepts or stops them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from unisono.core.events import Repaired
from unisono.core.frozen import dataclass
from unisono.harmony.header import Header


@dataclass(frozen=True, slots=True)
class OpenPart:
    """Opened message. `tokens` is the whole legal header, from `<|start|>` to `<|message|>`.

    The message begins at the position `start` or later; `end` is the position after its header.
    """

    header: Header
    tokens: tuple[int, ...]
    start: int = 0
    end: int = 0
    # True if the whole message was read before its header was known. In that case `end` is the end of the message.
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class BodyPart:
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ClosedPart:
    """End of a message. `token` is its terminator, and `end` is the position after the message.

    `complete` is False if the message was truncated; `token` is then supplied by repair. A truncated call is not
    reported as a call.
    """

    token: int
    complete: bool = True
    end: int = 0


Legal: TypeAlias = OpenPart | BodyPart | ClosedPart | Repaired


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
