"""What repair hands on: well-formed messages in parts, and what had to be mended between them.

Places count the tokens that a generation's prompt did not end in `<|start|>assistant` with, generated ones and others
that were read in their place, so that whoever has those tokens can cut them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from unisono.core.events import Repaired
from unisono.harmony.header import Header


@dataclass(frozen=True, slots=True)
class OpenPart:
    """`tokens` is the whole legal header, `<|start|>` to `<|message|>`. Before the place `begin` there is nothing of
    the message, and `end` is behind its header."""

    header: Header
    tokens: tuple[int, ...]
    begin: int = 0
    end: int = 0
    is_whole: bool = False
    """The whole message was read before its header was known: `end` is the place at the end of the message."""


@dataclass(frozen=True, slots=True)
class BodyPart:
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ClosedPart:
    """`complete` is False for a message that was cut: for a call, that it is none. `end` is the place behind it."""

    token: int
    complete: bool = True
    end: int = 0


Legal: TypeAlias = OpenPart | BodyPart | ClosedPart | Repaired
