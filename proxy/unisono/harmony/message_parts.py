"""Output of repair: well-formed messages in parts, and the repairs between them.

Positions count the tokens after the prompt's `<|start|>assistant`: those that the model generated, and those that the
gateway inserted. The caller stores these tokens, so it can truncate them at a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

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
