"""Messages between the two threads of the engine process, and its limits.

This module does not import mlx, so that the socket thread runs and can report an import error of mlx.
"""

from __future__ import annotations

from typing import TypeAlias

from unisono.core.frozen import dataclass
from unisono_adapters.mlx.guides import Guide
from unisono_adapters.mlx.wire import GenerateCommand, ToGateway

EVERYONE = -1

# Message with its connection number, or EVERYONE for all connections.
Addressed: TypeAlias = tuple[int, ToGateway]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of the engine: `batch` concurrent and `waiting` queued requests.

    `prefill_chunk` is in tokens. It limits the duration of a step, and with it the delay of a cancellation.
    """

    batch: int = 32
    waiting: int = 256
    prefill_chunk: int = 512
    prefix_cache_bytes: int = 2 * 1024**3
    prefix_cache_entries: int = 64


@dataclass(frozen=True, slots=True)
class Submit:
    """Request to submit; `guide` enforces its constraint, if any."""

    connection: int
    command: GenerateCommand
    guide: Guide | None = None


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Withdrawal of one request of a connection, or of all of them if `id` is None."""

    connection: int
    id: int | None = None


Command: TypeAlias = Submit | Withdraw
