"""What repair hands on: well-formed messages in parts, and what had to be mended between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from unisono.core.events import Repaired
from unisono.harmony.header import Header


@dataclass(frozen=True, slots=True)
class Open:
    """`tokens` is the whole legal header, `<|start|>` to `<|message|>`."""

    header: Header
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Body:
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Shut:
    """`complete` is False for a message that was cut: for a call, that it is none."""

    token: int
    complete: bool = True


Legal: TypeAlias = Open | Body | Shut | Repaired
