"""Output of repair: well-formed messages in parts, and the repairs between them.

Positions count the tokens after the prompt's `<|start|>assistant`: those that the model generated, and those that the
gateway inserted. The caller, which keeps these tokens, can cut them at a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from unisono.core.events import Repaired
from unisono.core.frozen import dataclass
from unisono.harmony.header import Header


@dataclass(frozen=True, slots=True)
class OpenPart:
    """Opened message. `tokens` is the whole legal header, `<|start|>` to `<|message|>`.

    The message begins at the position `start` or later; `end` is the position after its header.
    """

    header: Header
    tokens: tuple[int, ...]
    start: int = 0
    end: int = 0
    # True if the whole message was read before its header was known; `end` is then its end.
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class BodyPart:
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ClosedPart:
    """End of a message. `token` ends the message, `end` is the position after it.

    `complete` is False if the message was truncated. A truncated call is not reported as a call.
    """

    token: int
    complete: bool = True
    end: int = 0


Legal: TypeAlias = OpenPart | BodyPart | ClosedPart | Repaired
