"""What the two threads of the engine process say to each other, and how much work the engine takes on.

Kept free of mlx, so that the socket thread runs, and can say why, where mlx cannot be imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from unisono_adapters.mlx.guides import Guide
from unisono_adapters.mlx.wire import GenerateCommand, ToGateway

EVERYONE = -1

Told: TypeAlias = tuple[int, ToGateway]
"""A message and the number of the connection it goes to; EVERYONE for all of them."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`batch` requests run at once and `waiting` more queue up. `prefill_chunk` is in tokens: it bounds how long one
    step can take, and so how late a cancel is obeyed."""

    batch: int = 32
    waiting: int = 256
    prefill_chunk: int = 512
    prefix_cache_bytes: int = 2 * 1024**3
    prefix_cache_entries: int = 64


@dataclass(frozen=True, slots=True)
class Submit:
    """`guide` keeps it to what its constraint allows, where it has one."""

    connection: int
    ask: GenerateCommand
    guide: Guide | None = None


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Forget one request of a connection, or all of them when `id` is None."""

    connection: int
    id: int | None = None


Command: TypeAlias = Submit | Withdraw
