"""Parts of repaired messages, and the gate that accepts or stops them.

A position is a number of tokens after the prompt's `<|start|>assistant`. It counts the tokens that the model generated
and those that the gateway inserted. The caller stores these tokens, so it can truncate them at a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from unisono.core.events import Repaired
from unisono.core.frozen import dataclass
from unisono.harmony.header import Header


@dataclass(frozen=True, slots=True)
class OpenPart:
    """Beginning of a message. `tokens` is the whole legal header, `<|start|>` to `<|message|>`.

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

    `complete` is False if the message was truncated. In that case, repair supplied `token`, and a call is not reported
    as a call.
    """

    token: int
    complete: bool = True
    end: int = 0


Legal: TypeAlias = OpenPart | BodyPart | ClosedPart | Repaired


class Gate(Protocol):
    """Policy that accepts or stops messages; called once or twice per message, never per token."""

    def opens(self, message: OpenPart) -> bool:
        """Return False to stop reading before the message. No part of the message was emitted."""
        ...

    def is_aside(self, header: Header) -> bool:
        """Return whether a text with this header is emitted as reasoning instead of visible text."""
        ...

    def is_buffered(self, header: Header) -> bool:
        """Return whether a text or a call with this header is emitted only when it is complete."""
        ...

    def closes(self, header: Header, text: str, *, held: bool) -> str | None:
        """Return the content of a complete message, or None to reject it and stop reading.

        The content is `text`, `text` without an enclosure such as a code fence, or an empty object instead of blanks.
        `held` is True if the text has been buffered. If `held` is False, the text was already emitted, and a result
        that does not begin with `text` is ignored.
        """
        ...

    def limits_blanks(self, header: Header) -> bool:
        """Return whether reading stops if the body has too many blanks in a row.

        The limit is meant for bodies that are JSON. Blanks inside JSON strings do not count.
        """
        ...

    @property
    def unfit(self) -> bool:
        """True if the last accepted answer does not have the form that the request demands.

        A gate accepts such an answer if no attempt to correct it is left. The answer is then emitted as a refusal.
        """
        ...


@dataclass(frozen=True, slots=True)
class Stopped:
    """Message at which a gate stopped reading.

    The message begins at the position `start`, its header ends at `header_end`, and reading stopped at `end`.
    `tokens` are the tokens of the message's legal header.
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
    # True if reading stopped before a message that repair had read as a whole, as `OpenPart.is_whole`.
    is_whole: bool = False
